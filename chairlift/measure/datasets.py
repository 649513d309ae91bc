"""Prompts and output lengths for the load generator, which knows neither the model nor its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.measure.openai_client import Prompt
from chairlift.measure.traces import trace_workload
from chairlift.measure.workload import WorkloadError

CHARACTERS_PER_TOKEN = 4  # of English text, roughly; only where a data set's answers must be sized without a tokenizer
# Each is one token, with the space before it, for the byte-pair vocabularies in use.
WORDS = """
    time year people way day man thing woman life child world school state family student group country problem hand
    part place case week company system program question work government number night point home water room mother
    area money story fact month lot right study book eye job word business issue side kind head house service friend
    father power hour game line end member law car city name team minute idea body information back parent face level
    office door health person art war history party result change morning reason research girl guy moment air teacher
""".split()  # noqa: SIM905 - a list of a hundred strings is no easier to read


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request.

    Attributes:
        prompt: text, or token ids.
        prompt_tokens: how many tokens it should have; the server's own count is taken where it gives one.
        output_tokens: asked for.
        arrival: seconds after the start, where the data set says so.
    """

    prompt: Prompt
    prompt_tokens: int
    output_tokens: int
    arrival: float | None = None


def random_requests(
    rng: np.random.Generator, count: int, *, input_len: int, output_len: int, range_ratio: float, vocab_size: int | None
) -> list[BenchRequest]:
    """Lengths drawn evenly within ``range_ratio`` of the given ones, prompts that share nothing.

    With ``vocab_size`` prompts are token ids, and exactly as long as asked. Without, they are words of about one token.
    """
    if input_len < 1 or output_len < 1:
        raise WorkloadError(f"lengths must be at least 1, got {input_len} and {output_len}")
    if not 0 <= range_ratio < 1:
        raise WorkloadError(f"--random-range-ratio must be in [0, 1), got {range_ratio:g}")
    requests = []
    for _ in range(count):
        prompt_tokens, output_tokens = (
            int(rng.integers(max(1, int(n * (1 - range_ratio))), int(n * (1 + range_ratio)) + 1))
            for n in (input_len, output_len)
        )
        requests.append(BenchRequest(_prompt(rng, prompt_tokens, vocab_size), prompt_tokens, output_tokens))
    return requests


def trace_requests(
    path: Path, *, count: int, max_length: int, vocab_size: int | None, seed: int, time_scale: float
) -> list[BenchRequest]:
    """The requests of a recorded trace, see :func:`trace_workload`, at its times."""
    size = vocab_size or len(WORDS)
    workload = trace_workload(
        path, max_length=max_length, vocab_size=size, seed=seed, time_scale=time_scale, limit=count
    )
    requests = []
    for request in workload.requests:
        ids = request.prompt_token_ids
        prompt: Prompt = ids if vocab_size else " ".join(WORDS[i] for i in ids)
        requests.append(BenchRequest(prompt, len(ids), request.output_tokens, request.arrival))
    return requests


def sharegpt_requests(path: Path, count: int, output_len: int | None) -> list[BenchRequest]:
    """The first question of each conversation of a ShareGPT file, with an answer as long as the first answer there.

    Without a tokenizer a length in tokens is taken to be a quarter of that in characters.
    """
    conversations = _load(path, path.read_text)
    requests = []
    for item in conversations if isinstance(conversations, list) else ():
        turns = [t.get("value") for t in item.get("conversations", ())] if isinstance(item, dict) else []
        if len(turns) >= 2 and turns[0] and turns[1]:
            requests.append(_text_request(turns[0], output_len or _tokens(turns[1])))
        if len(requests) == count:
            break
    if not requests:
        raise WorkloadError(f"{path} has no conversation of two turns in ShareGPT's format")
    return requests


def custom_requests(path: Path, count: int, output_len: int | None) -> list[BenchRequest]:
    """A JSONL file with ``prompt`` in each line, and ``output_tokens`` where ``output_len`` does not say it."""
    requests: list[BenchRequest] = []
    lines = _load(path, lambda encoding: path.read_text(encoding).splitlines(), parse=False)
    for number, line in enumerate(lines, 1):
        if len(requests) == count:
            break
        try:
            row = json.loads(line)
            prompt, wanted = row["prompt"], output_len or row.get("output_tokens")
            if not isinstance(prompt, str) or not prompt or not isinstance(wanted, int) or wanted < 1:
                raise ValueError("needs a prompt, and output_tokens or --custom-output-len")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorkloadError(f"{path}, line {number}: {error}") from error
        requests.append(_text_request(prompt, wanted))
    if not requests:
        raise WorkloadError(f"{path} has no requests")
    return requests


def _load(path: Path, read: Any, *, parse: bool = True) -> Any:
    try:
        text = read(encoding="utf-8")
        return json.loads(text) if parse else text
    except (OSError, ValueError) as error:
        raise WorkloadError(f"cannot read {path}: {error}") from error


def _text_request(prompt: str, output_tokens: int) -> BenchRequest:
    return BenchRequest(prompt, _tokens(prompt), output_tokens)


def _tokens(text: str) -> int:
    return max(1, len(text) // CHARACTERS_PER_TOKEN)


def _prompt(rng: np.random.Generator, length: int, vocab_size: int | None) -> Prompt:
    ids: Sequence[int] = rng.integers(0, vocab_size or len(WORDS), length).tolist()
    return tuple(ids) if vocab_size else " ".join(WORDS[i] for i in ids)
