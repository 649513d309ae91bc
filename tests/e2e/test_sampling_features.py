"""Logprobs, penalties and biases of an engine in fp32 against transformers, however the work is cut and put aside."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from support.likelihoods import expected_log_likelihood, log_likelihoods
from support.server import Server
from transformers import LlamaForCausalLM

from chairlift import LLM, SamplingParams
from chairlift.engine.llm import GenerationOutput
from chairlift.text.errors import PromptError

BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4  # tokens × layers × (key, value) × heads × width × fp32
TOLERANCE = 1e-4
END = 257


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def all_logits(reference: LlamaForCausalLM, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([list(token_ids)])).logits[0]


def run(model: Path, prompts: list[list[int]], params: list[SamplingParams], **options: Any) -> list[GenerationOutput]:
    with LLM(str(model), dtype="float32", num_threads=1, max_num_seqs=8, max_model_len=400, **options) as llm:
        outputs = llm.generate(prompts, params)
        llm.core.scheduler.check_integrity()
        assert llm.core.scheduler.kv.num_used_blocks == 0
        preempted = sum(record.preempted for record in llm.core.step_log.records)
        assert (preempted > 0) == ("preemption_mode" in options)
        return outputs


STEM = [65 + i % 26 for i in range(40)]


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Every feature, on prompts that partly begin alike and are longer than a step."""
    chance = random.Random(3)
    features: list[dict[str, Any]] = [
        {"logprobs": 3, "prompt_logprobs": 2},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 0},
        {"repetition_penalty": 1.3, "prompt_logprobs": 0},
        {"logit_bias": {70: 5.0, 71: -50.0}, "logprobs": 1},
        {"min_tokens": 12, "stop_token_ids": list(range(60, 120)), "ignore_eos": False},
        {"prompt_logprobs": 4, "max_tokens": 0},
        {"min_p": 0.05, "repetition_penalty": 0.9, "frequency_penalty": -0.3},
        {},
    ]
    prompts, params = [], []
    for i in range(24):
        prompts.append(
            STEM[: chance.choice((0, 40))] + [chance.randrange(256) for _ in range(chance.randrange(1, 100))]
        )
        common = {"max_tokens": chance.randrange(13, 60), "ignore_eos": True, "seed": i}
        common |= {"temperature": 0.0} if i % 3 else {"temperature": 0.9}
        params.append(SamplingParams(**(common | features[i % len(features)])))
    return prompts, params


@pytest.fixture(scope="module")
def undisturbed(tiny_model: Path) -> list[GenerationOutput]:
    return run(tiny_model, *workload(), enable_prefix_caching=False)


def test_logprobs_of_prompts_and_answers_equal_the_reference(
    undisturbed: list[GenerationOutput], reference: LlamaForCausalLM
) -> None:
    checked = 0
    for output, params in zip(undisturbed, workload()[1], strict=True):
        answer = output.outputs[0]
        tokens = [*output.prompt_token_ids, *answer.token_ids]
        expected = all_logits(reference, tokens).log_softmax(-1)
        asked = [(params.prompt_logprobs, 1, output.prompt_logprobs, len(output.prompt_token_ids) - 1)]
        asked += [(params.logprobs, len(output.prompt_token_ids), answer.logprobs, len(answer.token_ids))]
        for num_top, first, told, count in asked:
            assert len(told) == (0 if num_top is None else count)
            for position, logprob in enumerate(told, first):
                row = expected[position - 1]
                assert logprob.token_id == tokens[position]
                assert logprob.logprob == pytest.approx(float(row[logprob.token_id]), abs=TOLERANCE)
                best = row.topk(num_top)
                assert [value for _, value in logprob.top] == pytest.approx(best.values.tolist(), abs=TOLERANCE)
                assert all(value == pytest.approx(float(row[token]), abs=TOLERANCE) for token, value in logprob.top)
                assert abs(logprob.rank - 1 - int((row > row[logprob.token_id] + TOLERANCE).sum())) <= 1
                checked += 1
    assert checked > 500


def adjusted(row: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    values = []
    for token, logit in enumerate(row):
        value = logit + (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = list(output).count(token)
        value -= params.frequency_penalty * count + (params.presence_penalty if count else 0)
        if len(output) < params.min_tokens and token in (*params.stop_token_ids, END):
            value = -math.inf
        values.append(value)
    return values


def test_greedy_tokens_are_the_best_of_the_adjusted_logits(
    undisturbed: list[GenerationOutput], reference: LlamaForCausalLM
) -> None:
    changed = 0
    for output, params in zip(undisturbed, workload()[1], strict=True):
        answer = output.outputs[0].token_ids
        if not params.greedy or not answer:
            continue
        prompt = output.prompt_token_ids
        logits = all_logits(reference, [*prompt, *answer])
        for i, token in enumerate(answer):
            row = logits[len(prompt) + i - 1].tolist()
            values = adjusted(row, params, prompt, answer[:i])
            assert values[token] >= max(values) - TOLERANCE
            changed += row[token] < max(row)
    assert changed > 20


def test_no_answer_ends_before_its_least_length(undisturbed: list[GenerationOutput]) -> None:
    answers = [
        (output.outputs[0], params)
        for output, params in zip(undisturbed, workload()[1], strict=True)
        if params.min_tokens
    ]
    assert answers
    for answer, params in answers:
        assert not set(answer.token_ids[: params.min_tokens]) & {*params.stop_token_ids, END}
        assert len(answer.token_ids) > params.min_tokens
    assert "stop" in {answer.finish_reason for answer, _ in answers}


SETTINGS: dict[str, dict[str, Any]] = {
    "short steps": {"max_num_batched_tokens": 9},
    "prefix cache": {},
    "recompute": {"kv_cache_memory_bytes": 25 * BLOCK_BYTES, "preemption_mode": "recompute"},
    "recompute in short steps": {
        "kv_cache_memory_bytes": 25 * BLOCK_BYTES, "preemption_mode": "recompute", "max_num_batched_tokens": 17,
    },
    "swap": {"kv_cache_memory_bytes": 25 * BLOCK_BYTES, "preemption_mode": "swap", "swap_space": 0.01},
    "static": {"batching": "static", "static_batch_size": 5, "static_batch_timeout": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_depends_on_how_the_work_is_done(
    tiny_model: Path, undisturbed: list[GenerationOutput], name: str
) -> None:
    for result, expected in zip(run(tiny_model, *workload(), **SETTINGS[name]), undisturbed, strict=True):
        answer, right = result.outputs[0], expected.outputs[0]
        assert answer.token_ids == right.token_ids
        assert (answer.text, answer.finish_reason) == (right.text, right.finish_reason)
        for told, due in ((answer.logprobs, right.logprobs), (result.prompt_logprobs, expected.prompt_logprobs)):
            assert [logprob.token_id for logprob in told] == [logprob.token_id for logprob in due]
            values = [logprob.logprob for logprob in told]
            assert values == pytest.approx([logprob.logprob for logprob in due], abs=TOLERANCE)


def test_a_prompt_that_is_cached_gets_its_logprobs_all_the_same(tiny_model: Path) -> None:
    prompt = STEM * 3
    with LLM(str(tiny_model), dtype="float32", num_threads=1, max_model_len=200) as llm:
        llm.generate([prompt], SamplingParams(max_tokens=2))
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        [again] = llm.generate([prompt], params)
        assert len(again.prompt_logprobs) == len(prompt) - 1
        [plain] = llm.generate([prompt], SamplingParams(max_tokens=1))
    assert again.outputs[0].timing is not None
    assert again.outputs[0].timing.cached_tokens == 0
    assert plain.outputs[0].timing is not None
    assert plain.outputs[0].timing.cached_tokens > 0


def test_a_token_that_the_model_does_not_have_is_refused_before_anything_runs(tiny_model: Path) -> None:
    with LLM(str(tiny_model), dtype="float32", num_threads=1, max_model_len=100) as llm:
        for params in (SamplingParams(logit_bias={258: 1.0}), SamplingParams(stop_token_ids=[999], min_tokens=1)):
            with pytest.raises(ValueError, match=r"names token \d+; the model's are from 0 to 257"):
                llm.generate([[1, 2]], params)
        with pytest.raises(PromptError):
            llm.generate([[1] * 101], SamplingParams(max_tokens=0))
        [whole] = llm.generate([[1] * 100], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert (whole.outputs[0].token_ids, whole.outputs[0].finish_reason) == ([], "length")
    assert len(whole.prompt_logprobs) == 99


# ---- over HTTP, as lm-eval's local-completions asks ----


def test_log_likelihoods_over_http_equal_the_reference(tiny_server: Server, reference: LlamaForCausalLM) -> None:
    chance = random.Random(5)
    pairs = [
        ([chance.randrange(256) for _ in range(length)], [chance.randrange(256) for _ in range(1 + length % 9)])
        for length in (1, 7, 50, 300, 600)
    ]
    expected = [expected_log_likelihood(reference, *pair) for pair in pairs]
    assert log_likelihoods(tiny_server, "tiny", pairs) == pytest.approx(expected, abs=1e-2)
    assert log_likelihoods(tiny_server, "tiny", pairs[::-1]) == pytest.approx(expected[::-1], abs=1e-2)


def test_a_bad_bias_costs_the_engine_nothing(tiny_server: Server) -> None:
    """Pitfall 12."""
    for bias in ({"258": 1}, {"100000": -100}, {"5": 1000}, {"-1": 1}, {"9" * 30: 1}):
        body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 2, "logit_bias": bias}
        response = httpx.post(f"{tiny_server.api}/completions", json=body, timeout=60)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "logit_bias"
    body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 3, "logit_bias": {"65": 100}, "temperature": 0}
    answer = httpx.post(f"{tiny_server.api}/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] == "bbb"  # the tiny model's token 65


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_an_echo_without_new_tokens(tiny_server: Server, stream: bool, logprobs: int | None) -> None:
    """Pitfall 12."""
    prompt = "A chairlift é"
    body = {
        "model": "tiny", "prompt": [prompt, "B"], "max_tokens": 0, "echo": True, "logprobs": logprobs, "stream": stream,
    }  # fmt: skip
    response = httpx.post(f"{tiny_server.api}/completions", json=body, timeout=60)
    response.raise_for_status()
    if stream:
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        choices = sorted((json.loads(event)["choices"][0] for event in events), key=lambda choice: choice["index"])
    else:
        choices = response.json()["choices"]
        assert response.json()["usage"]["completion_tokens"] == 0
    assert [choice["text"] for choice in choices] == [prompt, "B"]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    if logprobs is None:
        assert choices[0]["logprobs"] is None
    else:
        told = choices[0]["logprobs"]
        size = len(prompt.encode())
        assert [len(values) for values in told.values()] == [size] * 4
        assert told["tokens"][-2:] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert told["text_offset"] == [*range(len(prompt)), len(prompt) - 1]
