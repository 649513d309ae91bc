"""Recorded traffic: Azure's CSV and Mooncake's JSONL.

Azure (https://github.com/Azure/AzurePublicDataset): ``TIMESTAMP,ContextTokens,GeneratedTokens``, timestamps with seven
digits after the second. Mooncake (https://github.com/kvcache-ai/Mooncake): one object a line with ``timestamp`` in
milliseconds, ``input_length``, ``output_length``, and ``hash_ids``, one for each 512 tokens of the prompt: where two
requests have the same id, they have the same block, and the same prompt up to it.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.measure.workload import Workload, WorkloadError, WorkloadRequest, random_prompt

MOONCAKE_BLOCK = 512  # tokens of a prompt that one hash id stands for
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace.

    Attributes:
        time: seconds after the first line.
        prompt_tokens, output_tokens: lengths, at least 1 each.
        hash_ids: of its prompt blocks, where the trace has them.
    """

    time: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, max_requests: int | None = None) -> list[TraceRequest]:
    """Reads a trace of either kind, told apart by their first line, in order of time.

    Lines of failed requests, which have no output, are left out.

    Raises:
        WorkloadError: the file cannot be read, is of neither kind, or a line of it is wrong (which one, and why).
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            if first.lstrip().startswith("{"):
                found = _requests(path, file, _mooncake, 1)
            elif all(column in first for column in AZURE_COLUMNS):
                found = _requests(path, csv.DictReader(file), _azure, 2)
            else:
                raise WorkloadError(
                    f"{path} is no trace that can be read: its first line is neither a JSON object with timestamp, "
                    f"input_length and output_length, nor the columns {', '.join(AZURE_COLUMNS)}"
                )
            requests = list(islice(found, max_requests))
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"cannot read the trace {path}: {error}") from error
    if not requests:
        raise WorkloadError(f"the trace {path} has no requests")
    requests.sort(key=lambda request: request.time)
    start = requests[0].time
    return [TraceRequest(r.time - start, r.prompt_tokens, r.output_tokens, r.hash_ids) for r in requests]


def _requests(
    path: Path, rows: Iterable[Any], parse: Callable[[Any], TraceRequest], first: int
) -> Iterator[TraceRequest]:
    for number, row in enumerate(rows, first):
        try:
            request = parse(row)
        except (KeyError, TypeError, ValueError) as error:
            cause = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise WorkloadError(f"{path}, line {number}: {cause}") from error
        if request.output_tokens:
            yield request


def _azure(row: dict[str, str]) -> TraceRequest:
    stamp, _, fraction = row["TIMESTAMP"].partition(".")
    moment = datetime.fromisoformat(stamp).replace(tzinfo=UTC).timestamp() + float(f"0.{fraction or 0}")
    return TraceRequest(moment, _count(row["ContextTokens"], 1), _count(row["GeneratedTokens"], 0))


def _mooncake(line: str) -> TraceRequest:
    row = json.loads(line)
    time = float(row["timestamp"]) / 1000
    if not math.isfinite(time):
        raise ValueError(f"a timestamp of {row['timestamp']}")
    blocks = tuple(int(block) for block in row.get("hash_ids", ()))
    return TraceRequest(time, _count(row["input_length"], 1), _count(row["output_length"], 0), blocks)


def _count(value: str | int, least: int) -> int:
    count = int(value)
    if count < least:
        raise ValueError(f"{count} tokens, where there must be at least {least}")
    return count


def fit_lengths(requests: Iterable[TraceRequest], max_length: int) -> tuple[list[tuple[int, int]], float]:
    """Scales lengths to a model: (prompt, output) pairs whose sums are at most ``max_length``, and the factor used.

    Prompts are multiplied by ``max_length`` over the trace's longest sequence, or left alone if all fit. Outputs are
    kept, since an answer does not become shorter when a context window does, and cut where no room is left.
    """
    requests = list(requests)
    factor = min(1.0, max_length / max(r.prompt_tokens + r.output_tokens for r in requests))
    return [fit(r.prompt_tokens, r.output_tokens, factor, max_length) for r in requests], factor


def fit(prompt: int, output: int, factor: float, max_length: int) -> tuple[int, int]:
    """One pair by the rule of :func:`fit_lengths`. ``max_length`` is at least 2."""
    scaled = min(max(1, round(prompt * factor)), max_length - 1)
    return scaled, max(1, min(output, max_length - scaled))


def trace_workload(
    path: Path, *, max_length: int, vocab_size: int, seed: int, time_scale: float, limit: int | None
) -> Workload:
    """A trace's requests at its times, multiplied by ``time_scale``, with prompts of random tokens.

    Blocks of equal hash id get equal tokens, so that a prefix cache finds what it would have found.
    """
    if not time_scale > 0:
        raise WorkloadError(f"the time scale must be above 0, got {time_scale:g}")
    trace = read_trace(path, limit)
    lengths, factor = fit_lengths(trace, max_length)
    requests = tuple(
        WorkloadRequest(
            str(number), _prompt(row, prompt, factor, vocab_size, seed, number), output, row.time * time_scale
        )
        for number, (row, (prompt, output)) in enumerate(zip(trace, lengths, strict=True), 1)
    )
    return Workload(
        f"trace {path.name}",
        f"{len(requests)} requests of {path.name} at its times × {time_scale:g}, prompts × {factor:.3g}.",
        requests,
    )


def _prompt(row: TraceRequest, length: int, factor: float, vocab_size: int, seed: int, number: int) -> tuple[int, ...]:
    if not row.hash_ids:
        return random_prompt(np.random.default_rng((seed, number)), length, vocab_size)
    block = max(1, round(MOONCAKE_BLOCK * factor))
    tokens: list[int] = []
    for hash_id in row.hash_ids:
        tokens += random_prompt(np.random.default_rng((seed, 1, hash_id)), block, vocab_size)
    # Rounding can leave the blocks a little short; the rest is the request's own.
    return (*tokens, *random_prompt(np.random.default_rng((seed, number)), max(0, length - len(tokens)), vocab_size))[
        :length
    ]
