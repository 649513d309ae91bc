"""Compute: from a plan to tensors, through the model, to tokens."""

import os

# How long a compute thread that waits for another one spins before it sleeps, in turns of some tens of nanoseconds.
# GNU's default is as good as endless: quick on an idle machine, but with a busy neighbour on one of two cores a step of
# one sequence took 17 times as long. Sleeping at once costs half as much again on the idle machine. A millisecond of
# spinning at most was as quick there as the default, and beside the neighbour a step took 3 times as long. OpenMP reads
# this when torch brings it in, so it is set before any module here imports torch.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
