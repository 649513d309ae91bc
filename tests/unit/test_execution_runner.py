"""Which rows are sampled from their logits, and which take what the model has chosen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.execution.runner import ModelRunner, StepOutcome
from chairlift.model.base import ModelOutput
from chairlift.scheduling.plan import RowCounts, SequenceChunk, SequenceContext, StepPlan
from chairlift.scheduling.sampling_params import SamplingParams

VOCAB = 40
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, seed=0)


class Model:
    """Gives row i the logits ``logits[i]``, and says that its best token is ``best[i]``, be it true or not."""

    def __init__(self, logits: Tensor, best: list[int] | None) -> None:
        self.scores, self.best = logits, best
        self.asked: list[bool] = []

    def __call__(self, token_ids: Tensor, *rest: Any) -> ModelOutput:
        *_, sampled, wants_logits = rest
        self.asked.append(wants_logits)
        hidden = torch.arange(len(token_ids))[:, None].float()  # a row is its own number
        logits = self.logits(hidden[sampled]) if wants_logits or self.best is None else self.scores[:0]
        return ModelOutput(hidden, logits, self.best)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.scores[hidden[:, 0].long()]


class Attention:
    def prepare(self, layout: Any) -> None:
        pass


class Cache:
    layers = ()


def run(logits: Tensor, best: list[int] | None, *chunks: SequenceChunk) -> tuple[StepOutcome, list[bool]]:
    model: Any = Model(logits, best)
    attention: Any = Attention()
    cache: Any = Cache()
    runner = ModelRunner(model, attention, cache, block_size=4, device=CPU)
    return runner.run(StepPlan(3, chunks, RowCounts())), model.asked


def chunk(params: SamplingParams = GREEDY, name: str = "r", allowed: bytes | None = None) -> SequenceChunk:
    context = SequenceContext([7, 8], 1, frozenset({9})) if params.adjusts_logits else None
    return SequenceChunk(name, [8], 1, [0], params, context=context, allowed=allowed)


def scores(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5))


def test_what_the_model_has_chosen_is_taken_without_any_logits() -> None:
    outcome, asked = run(scores(3), [11, 0, 39], chunk(), chunk(), chunk())
    assert (outcome.token_ids, outcome.failed, outcome.logprobs, asked) == ([11, 0, 39], {}, [], [False])


def test_a_model_that_chooses_nothing_has_its_logits_read() -> None:
    logits = scores(2)
    outcome, _ = run(logits, None, chunk(), chunk())
    assert outcome.token_ids == logits.argmax(dim=1).tolist()


OTHERS = {
    "bias": SamplingParams(temperature=0, seed=0, logit_bias={3: 100}),
    "penalty": SamplingParams(temperature=0, seed=0, repetition_penalty=1.5),
    "min_tokens": SamplingParams(temperature=0, seed=0, min_tokens=5),
    "logprobs": SamplingParams(temperature=0, seed=0, logprobs=0),
    "noise": SamplingParams(temperature=1, seed=0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whoever_needs_logits_is_sampled_from_them_and_the_others_are_not(name: str) -> None:
    logits = scores(3)
    [expected] = run(logits[1:2].clone(), None, chunk(OTHERS[name]))[0].token_ids
    outcome, asked = run(logits, [38, 39, 37], chunk(), chunk(OTHERS[name]), chunk())
    assert (outcome.token_ids, asked) == ([38, expected, 37], [True])
    assert expected != 39


def test_a_form_keeps_its_promise() -> None:
    only_six = (1 << 6).to_bytes(8, "little")
    outcome, asked = run(scores(2), [1, 2], chunk(), chunk(allowed=only_six))
    assert (outcome.token_ids, asked) == ([1, 6], [True])


def test_logprobs_belong_to_the_rows_that_want_them() -> None:
    logits = scores(4)
    wanted = logits[2].log_softmax(-1)
    top = int(wanted.argmax())
    params = OTHERS["logprobs"]
    outcome, _ = run(logits, [1, 2, 3, 4], chunk(), chunk(), chunk(params), chunk(OTHERS["noise"]))
    assert outcome.token_ids[:3] == [1, 2, top]
    assert [score is None for score in outcome.logprobs] == [True, True, False, True]
    [score] = [score for score in outcome.logprobs if score is not None]
    assert score.token_id == top
    assert score.logprob == pytest.approx(float(wanted[top]))


@pytest.mark.parametrize("other", [GREEDY, OTHERS["noise"]])
def test_a_row_without_a_best_fails_alone(other: SamplingParams) -> None:
    logits = scores(3)
    logits[1, 7] = math.nan
    [expected] = run(logits[2:3].clone(), [5], chunk(other))[0].token_ids
    outcome, _ = run(logits, [3, -1, 5], chunk(), chunk(name="bad"), chunk(other))
    assert list(outcome.failed) == ["bad"]
    assert "not finite" in outcome.failed["bad"]
    assert [outcome.token_ids[0], outcome.token_ids[2]] == [3, expected]


def test_a_row_that_has_a_best_after_all_is_sampled() -> None:
    logits = scores(2)
    outcome, _ = run(logits, [-1, 4], chunk(), chunk())
    assert (outcome.token_ids, outcome.failed) == ([int(logits[0].argmax()), 4], {})
