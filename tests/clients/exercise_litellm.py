"""litellm against a server. Run: python exercise_litellm.py URL MODEL."""

from __future__ import annotations

import json
import sys

import litellm

MESSAGES = [{"role": "user", "content": "What does a chairlift do?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]},
    },
}


def exercise(url: str, model: str) -> None:
    asked = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "-", "messages": MESSAGES}
    whole = litellm.completion(**asked, max_tokens=12, seed=5)
    assert whole.usage.completion_tokens <= 12
    chunks = list(litellm.completion(**asked, max_tokens=12, seed=5, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == (whole.choices[0].message.content or "")
    called = litellm.completion(
        **asked, max_tokens=400, seed=5, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["city"] == "Oslo"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    formed = litellm.completion(**asked, max_tokens=400, seed=5, response_format=form)
    assert json.loads(formed.choices[0].message.content)["a"] in (1, 2)
    text = litellm.text_completion(
        model=f"text-completion-openai/{model}", api_base=f"{url}/v1", api_key="-", prompt="hi", max_tokens=5
    )
    assert text.choices[0].finish_reason in ("length", "stop")


if __name__ == "__main__":
    exercise(sys.argv[1], sys.argv[2])
    print("ok")
