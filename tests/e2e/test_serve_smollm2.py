"""The built-in model behind the OpenAI API, asked by OpenAI's own client."""

from __future__ import annotations

import openai
import pytest
from support.server import Server

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


@pytest.fixture
def client(smollm2_server: Server):
    with openai.OpenAI(base_url=smollm2_server.api, api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=30)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_streaming_gives_the_same_text_in_pieces(client: openai.OpenAI):
    whole = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=30)
    stream = client.chat.completions.create(
        model="smollm2",
        messages=QUESTION,
        temperature=0,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(pieces) > 3
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_completions_streaming_and_not(client: openai.OpenAI):
    request = {"model": "smollm2", "prompt": "One, two, three,", "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**request)
    assert "four" in whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**request, stream=True))
    assert streamed == whole.choices[0].text


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI):
    answer = client.completions.create(
        model="smollm2", prompt="One, two, three,", temperature=0, max_tokens=40, stop=["five", "never"]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "four" in answer.choices[0].text
    assert "five" not in answer.choices[0].text


def test_n_and_seed(client: openai.OpenAI):
    request = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "n": 3}
    first = client.completions.create(**request, seed=7)
    again = client.completions.create(**request, seed=7)
    other = client.completions.create(**request, seed=8)
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in again.choices]
    assert texts != [choice.text for choice in other.choices]
    assert first.usage.completion_tokens == 36


def test_batched_prompts_and_token_ids(client: openai.OpenAI, smollm2_server: Server):
    prompts = ["The sky is", "Grass is"]
    batch = client.completions.create(model="smollm2", prompt=prompts, max_tokens=4, temperature=0)
    single = [client.completions.create(model="smollm2", prompt=p, max_tokens=4, temperature=0) for p in prompts]
    assert [choice.text for choice in batch.choices] == [answer.choices[0].text for answer in single]
    tokens = client.completions.create(model="smollm2", prompt=[504, 6376, 314], max_tokens=4, temperature=0)
    assert tokens.usage.prompt_tokens == 3


def test_models_and_health(client: openai.OpenAI, smollm2_server: Server):
    [model] = client.models.list().data
    assert (model.id, model.max_model_len) == ("smollm2", 2048)
    health = smollm2_server.health()
    assert health["status"] == "ok"
    assert health["last_step_age_s"] >= 0


def test_metrics_count_what_was_served(client: openai.OpenAI, smollm2_server: Server):
    before = smollm2_server.metrics()
    client.completions.create(model="smollm2", prompt="One, two,", max_tokens=9, temperature=0)
    after = smollm2_server.metrics()
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert grown["chairlift:generation_tokens_total"] == 9
    assert grown["chairlift:prompt_tokens_total"] == 4
    assert grown["chairlift:time_to_first_token_seconds_count"] == 1
    assert grown["chairlift:inter_token_latency_seconds_count"] == 8
    assert grown['chairlift:request_success_total{finished_reason="length"}'] == 1


def test_start_up_output_says_what_is_loaded(smollm2_server: Server):
    text = "".join(smollm2_server.output)
    for word in ("SmolLM2" if "SmolLM2" in text else "smollm2", "LlamaForCausalLM", "weights", "KV cache", "2,048"):
        assert word in text


def test_a_wrong_model_is_a_404(client: openai.OpenAI):
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
