"""langchain-openai against a server. Run: python exercise_langchain_openai.py URL MODEL."""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field


class Lift(BaseModel):
    """A lift."""

    chairs: int = Field(ge=1, le=99)


@tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def exercise(url: str, model: str) -> None:
    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="-", max_tokens=12, seed=5)
    whole = chat.invoke("What does a chairlift do?")
    assert whole.usage_metadata["output_tokens"] <= 12
    assert "".join(chunk.content for chunk in chat.stream("What does a chairlift do?")) == whole.content
    roomy = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="-", max_tokens=400, seed=5)
    assert 1 <= roomy.with_structured_output(Lift, method="json_schema").invoke("a lift").chairs <= 99
    assert 1 <= roomy.with_structured_output(Lift, method="function_calling").invoke("a lift").chairs <= 99
    [call, *_] = roomy.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke("weather?").tool_calls
    assert call["args"]["city"] in ("Oslo", "Rome")
    assert isinstance(OpenAI(model=model, base_url=f"{url}/v1", api_key="-", max_tokens=5).invoke("hi"), str)


if __name__ == "__main__":
    exercise(sys.argv[1], sys.argv[2])
    print("ok")
