"""What changes the logits, and logprobs, against plain references that share nothing with the code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.execution.adjust import adjust, forbid
from chairlift.execution.logprobs import token_logprobs
from chairlift.scheduling.plan import SequenceChunk, SequenceContext
from chairlift.scheduling.sampling_params import SamplingParams

VOCAB = 70
STOPS = frozenset({3, 69})


def chunk(
    params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = (), allowed: bytes | None = None
) -> SequenceChunk:
    context = SequenceContext([*prompt, *output], len(prompt), STOPS) if params.adjusts_logits else None
    return SequenceChunk("r", [0], 9, [0], params, context=context, allowed=allowed)


def mask(tokens: Sequence[int], words: int = -(-VOCAB // 32)) -> bytes:
    """The bitmask as its definition has it, written out with integers."""
    values = [0] * words
    for token in tokens:
        values[token // 32] |= 1 << (token % 32)
    return b"".join(value.to_bytes(4, "little") for value in values)


def reference(
    row: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """One token at a time, in double precision."""
    adjusted = []
    for token, logit in enumerate(row):
        value = float(logit)
        if len(output) < params.min_tokens and token in STOPS:
            value = -math.inf
        value += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            r = params.repetition_penalty
            value = value / r if value > 0 else value * r
        count = list(output).count(token)
        value -= params.frequency_penalty * count
        value -= params.presence_penalty if count else 0.0
        adjusted.append(value)
    return adjusted


CASES = [
    SamplingParams(presence_penalty=1.5),
    SamplingParams(frequency_penalty=-0.75),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.5),
    SamplingParams(logit_bias={0: 5.0, 3: -100, 69: 100, 17: 0.25}),
    SamplingParams(min_tokens=7),
    SamplingParams(min_tokens=6),
    SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.7, logit_bias={3: 2, 4: 3, 5: -3}
    ),
    SamplingParams(min_tokens=9, logit_bias={3: 100}, repetition_penalty=2, presence_penalty=-2),
    SamplingParams(temperature=0.5),
]
PROMPT, OUTPUT = [1, 2, 3, 4, 4, 5, 68], [4, 5, 5, 5, 6, 69]


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_adjusted_logits_equal_the_reference_alone_and_together() -> None:
    given = rows(len(CASES))
    expected = torch.tensor([reference(given[i].tolist(), p, PROMPT, OUTPUT) for i, p in enumerate(CASES)])
    together = given.clone()
    adjust(together, [chunk(params, PROMPT, OUTPUT) for params in CASES])
    torch.testing.assert_close(together, expected, atol=1e-4, rtol=0)
    for i, params in enumerate(CASES):
        alone = given[i : i + 1].clone()
        adjust(alone, [chunk(params, PROMPT, OUTPUT)])
        assert torch.equal(alone[0], together[i])
    assert not torch.equal(together, given)


def test_bias_comes_before_the_repetition_penalty_and_that_before_the_others() -> None:
    row = torch.tensor([[-1.0, 1.0]])
    params = SamplingParams(logit_bias={0: 3.0}, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    adjust(row, [chunk(params, [0], [0, 0])])
    assert row.tolist() == [[(-1 + 3) / 2 - 2 * 0.5 - 0.25, 1.0]]


def test_penalties_of_presence_and_frequency_do_not_look_at_the_prompt() -> None:
    row = rows(1)
    before = row.clone()
    adjust(row, [chunk(SamplingParams(presence_penalty=2, frequency_penalty=2), PROMPT, [])])
    assert torch.equal(row, before)


@pytest.mark.parametrize(("generated", "forbidden"), [(0, True), (4, True), (5, False), (6, False)])
def test_ends_are_forbidden_until_there_are_enough_tokens(generated: int, forbidden: bool) -> None:
    row = torch.zeros(1, VOCAB)
    adjust(row, [chunk(SamplingParams(min_tokens=5), PROMPT, [8] * generated)])
    ended = {i for i, value in enumerate(row[0].tolist()) if value == -math.inf}
    assert ended == (set(STOPS) if forbidden else set())


def test_an_end_that_the_model_does_not_have_forbids_nothing() -> None:
    row = torch.zeros(1, 50)
    adjust(row, [chunk(SamplingParams(min_tokens=5), PROMPT, [])])
    assert [i for i, value in enumerate(row[0].tolist()) if value == -math.inf] == [3]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_only_what_a_form_allows_is_left(kind: Any) -> None:
    allowed = [0, 1, 31, 32, 33, 63, 64, 69]
    given = rows(3)
    masked = given.clone()
    params = SamplingParams()
    forbid(masked, [chunk(params), chunk(params, allowed=kind(mask(allowed))), chunk(params)])
    assert torch.equal(masked[[0, 2]], given[[0, 2]])
    assert [i for i in range(VOCAB) if masked[1, i] != -math.inf] == allowed
    assert torch.equal(masked[1, allowed], given[1, allowed])


def test_what_lies_behind_the_end_of_a_mask_is_forbidden_and_its_spare_bits_mean_nothing() -> None:
    row = rows(1)
    forbid(row, [chunk(SamplingParams(), allowed=mask([5, 40], words=2))])
    assert [i for i in range(VOCAB) if row[0, i] != -math.inf] == [5, 40]
    row = rows(1)
    forbid(row, [chunk(SamplingParams(), allowed=mask([5, 95]))])
    assert [i for i in range(VOCAB) if row[0, i] != -math.inf] == [5]


def test_a_least_length_gives_way_where_a_form_allows_an_end_alone() -> None:
    params = SamplingParams(min_tokens=5)
    given = rows(2)
    row = given.clone()
    chunks = [chunk(params, PROMPT, allowed=mask([3])), chunk(params, PROMPT, allowed=mask([3, 4]))]
    forbid(row, chunks)
    adjust(row, chunks)
    assert [[i for i in range(VOCAB) if r[i] != -math.inf] for r in row] == [[3], [4]]
    assert row[0, 3] == given[0, 3]


def test_logprobs_equal_the_reference() -> None:
    given = rows(4, seed=1)
    given[2, 10:] = -math.inf
    tokens, tops = [5, 60, 3, 7], [0, 5, 20, VOCAB + 5]
    for row, token, top, result in zip(given.tolist(), tokens, tops, token_logprobs(given, tokens, tops), strict=True):
        total = math.log(sum(math.exp(logit) for logit in row))
        assert result.token_id == token
        assert result.logprob == pytest.approx(row[token] - total, abs=1e-4)
        assert result.rank == 1 + sum(logit > row[token] for logit in row)
        expected = sorted(range(VOCAB), key=lambda i: -row[i])[:top]
        finite = [token_id for token_id in expected if row[token_id] != -math.inf]
        assert [token_id for token_id, _ in result.top][: len(finite)] == finite
        assert len(result.top) == min(top, VOCAB)
        for token_id, value in result.top:
            assert value == pytest.approx(row[token_id] - total, abs=1e-4)


def test_the_likeliest_token_and_the_first_of_the_top_have_one_logprob_to_the_bit() -> None:
    given = rows(50, seed=2)
    best = given.argmax(-1).tolist()
    for result in token_logprobs(given, best, [1] * 50):
        assert result.top == ((result.token_id, result.logprob),)
        assert result.rank == 1


def test_tokens_that_tie_share_the_better_rank() -> None:
    assert [r.rank for r in token_logprobs(torch.tensor([[1.0, 2.0, 1.0]] * 3), [0, 1, 2], [0] * 3)] == [2, 1, 2]


def test_what_a_row_is_sampled_with_does_not_depend_on_the_others() -> None:
    given = rows(6, seed=3)
    chunks = [chunk(replace(params, seed=1), PROMPT, OUTPUT) for params in CASES[:6]]
    order = [4, 0, 5, 2, 1, 3]
    together, shuffled = given.clone(), given[order]
    adjust(together, chunks)
    adjust(shuffled, [chunks[i] for i in order])
    assert torch.equal(together[order], shuffled)
