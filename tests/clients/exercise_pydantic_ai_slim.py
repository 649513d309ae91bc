"""pydantic-ai against a server. Run: python exercise_pydantic_ai_slim.py URL MODEL."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Lift(BaseModel):
    """A lift."""

    chairs: int = Field(ge=1, le=99)
    kind: Literal["fixed", "detachable"]


async def exercise(url: str, model: str) -> None:
    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="-"))
    settings = {"max_tokens": 300, "seed": 5}
    for output in (Lift, NativeOutput(Lift)):
        lift = (
            await Agent(chat, output_type=output, retries=0).run("Describe a lift.", model_settings=settings)
        ).output
        assert 1 <= lift.chairs <= 99
    async with Agent(chat).run_stream("hi", model_settings={"max_tokens": 12, "temperature": 0}) as stream:
        streamed = await stream.get_output()
    whole = await Agent(chat).run("hi", model_settings={"max_tokens": 12, "temperature": 0})
    assert streamed == whole.output


if __name__ == "__main__":
    asyncio.run(exercise(sys.argv[1], sys.argv[2]))
    print("ok")
