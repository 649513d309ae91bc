"""Requests to simulate. Prompts hold no text, only what a prefix cache would find equal."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from chairlift.measure.arrivals import gamma_arrivals
from chairlift.measure.traces import MOONCAKE_BLOCK, TraceRequest, fit_lengths, read_trace
from chairlift.measure.workload import Workload, WorkloadError, WorkloadRequest
from chairlift.simulate.lengths import Lengths

FILLING = 0  # the tokens of a prompt after the first, which tells it from all others


def synthetic_workload(
    lengths: Lengths, *, rate: float = math.inf, burstiness: float = 1.0, clients: int | None = None, seed: int = 0
) -> Workload:
    """Requests of given lengths: from ``clients`` in a closed loop, or arriving at ``rate`` a second.

    Raises:
        WorkloadError: the rate, the burstiness or the clients cannot be.
    """
    pairs = lengths.pairs
    if clients is not None:
        arrivals = [0.0] * len(pairs)
        how = f"{clients} clients, each sending its next request when it has its answer"
    else:
        arrivals = gamma_arrivals(np.random.default_rng(seed), len(pairs), rate, burstiness)
        how = "all at once" if math.isinf(rate) else f"{rate:g} a second, burstiness {burstiness:g}"
    requests = tuple(
        WorkloadRequest(str(number), _own_prompt(number, prompt), output, arrival)
        for number, ((prompt, output), arrival) in enumerate(zip(pairs, arrivals, strict=True), 1)
    )
    return Workload("simulation", f"{len(pairs)} requests, {how}; {lengths.description}.", requests, clients)


def trace_workload(path: Path, *, max_length: int, time_scale: float = 1.0, limit: int | None = None) -> Workload:
    """A trace's requests at its times, multiplied by ``time_scale``. Blocks of equal hash id are equal tokens.

    Raises:
        WorkloadError: the trace cannot be read, or the scale cannot be.
    """
    if not 0 < time_scale < math.inf:
        raise WorkloadError(f"the time scale must be above 0, got {time_scale:g}")
    rows = read_trace(path, limit)
    lengths, factor = fit_lengths(rows, max_length)
    requests = tuple(
        WorkloadRequest(str(number), _prompt(number, row, prompt, factor), output, row.time * time_scale)
        for number, (row, (prompt, output)) in enumerate(zip(rows, lengths, strict=True), 1)
    )
    scaled = f", prompts × {factor:.3g} to fit {max_length} tokens" if factor < 1 else ""
    return Workload(
        f"trace {path.name}",
        f"{len(requests)} requests of {path.name} at its times × {time_scale:g}{scaled}.",
        requests,
    )


def shares_prefixes(workload: Workload) -> bool:
    """Whether any two prompts begin alike, so that a prefix cache has something to find."""
    firsts = {request.prompt_token_ids[0] for request in workload.requests}
    return len(firsts) < len(workload.requests)


def _own_prompt(number: int, length: int) -> tuple[int, ...]:
    return (number, *((FILLING,) * (length - 1)))


def _prompt(number: int, row: TraceRequest, length: int, factor: float) -> tuple[int, ...]:
    if not row.hash_ids:
        return _own_prompt(number, length)
    block = max(1, round(MOONCAKE_BLOCK * factor))
    tokens: list[int] = []
    for hash_id in row.hash_ids:
        tokens += [-1 - hash_id] * block  # below 0, where no request's own number is
    return (*tokens, *_own_prompt(number, max(1, length - len(tokens))))[:length]
