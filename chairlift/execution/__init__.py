"""Compute: from a plan to tensors, through the model, to tokens."""

import os

# Threads that wait for one another by spinning burn the core that another program, or the one they wait for, needs:
# with a neighbour on the cores a step was seen to take eight times as long as with threads that sleep. GNU's OpenMP
# reads this once, when torch brings it in, so it is set before any module here imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
