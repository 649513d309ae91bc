"""The openai package against a server. Run: python exercise_openai.py URL MODEL."""

from __future__ import annotations

import json
import sys

import openai
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "What does a chairlift do?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Lift(BaseModel):
    """What a model makes up of a lift."""

    chairs: int = Field(ge=1, le=99)
    name: str = Field(max_length=8)


def exercise(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
    assert model in [card.id for card in client.models.list()]
    assert client.models.retrieve(model).id == model
    chat(client, model)
    completions(client, model)
    structured(client, model)
    tools(client, model)
    responses(client, model)
    errors(client, model)


def chat(client: openai.OpenAI, model: str) -> None:
    fixed = {"model": model, "messages": MESSAGES, "max_tokens": 12, "seed": 5}
    whole = client.chat.completions.create(**fixed, logprobs=True, top_logprobs=2)
    assert whole.usage.completion_tokens <= 12
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 and token.bytes is not None for token in whole.choices[0].logprobs.content)
    stream = client.chat.completions.create(**fixed, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def completions(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=["a", "b"], n=2, max_tokens=5, logprobs=1, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text.startswith("a")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    penalized = client.completions.create(
        model=model, prompt="a", max_tokens=5, presence_penalty=1, frequency_penalty=1, logit_bias={"65": 100}
    )
    assert penalized.choices[0].text


def structured(client: openai.OpenAI, model: str) -> None:
    parsed = client.chat.completions.parse(model=model, messages=MESSAGES, response_format=Lift, max_tokens=400, seed=5)
    assert 1 <= parsed.choices[0].message.parsed.chairs <= 99
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    chosen = client.chat.completions.create(model=model, messages=MESSAGES, extra_body=extra)
    assert chosen.choices[0].message.content in ("yes", "no")


def tools(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "messages": MESSAGES, "tools": [WEATHER], "max_tokens": 400, "seed": 5}
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False)
        [call] = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    with client.chat.completions.stream(**asked, tool_choice="required", parallel_tool_calls=False) as stream:
        message = stream.get_final_completion().choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")
    said = message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    said.pop("parsed", None)
    for tool_call in said["tool_calls"]:
        tool_call["function"].pop("parsed_arguments", None)
        tool_call.pop("index", None)
    goes_on = client.chat.completions.create(model=model, messages=[*MESSAGES, said, result], max_tokens=5)
    assert goes_on.choices[0].finish_reason in ("length", "stop")


def responses(client: openai.OpenAI, model: str) -> None:
    asked = {"model": model, "input": "hi", "instructions": "Be brief.", "max_output_tokens": 20, "temperature": 0}
    whole = client.responses.create(**asked)
    *_, last = client.responses.create(**asked, stream=True)
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text
    parsed = client.responses.parse(model=model, input="hi", text_format=Lift)
    assert parsed.output_parsed.chairs >= 1


def errors(client: openai.OpenAI, model: str) -> None:
    for call, kind in (
        (lambda: client.chat.completions.create(model="other", messages=MESSAGES), openai.NotFoundError),
        (lambda: client.chat.completions.create(model=model, messages=[]), openai.BadRequestError),
        (lambda: client.embeddings.create(model=model, input="x"), openai.BadRequestError),
    ):
        refusal = None
        try:
            call()
        except kind as error:
            refusal = error
        assert refusal is not None, f"no {kind}"
        assert refusal.body["message"]


if __name__ == "__main__":
    exercise(sys.argv[1], sys.argv[2])
    print("ok")
