"""instructor against a server. Run: python exercise_instructor.py URL MODEL."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class Lift(BaseModel):
    """A lift."""

    chairs: int = Field(ge=1, le=99)
    kind: Literal["fixed", "detachable"]


def exercise(url: str, model: str) -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="-"), mode=mode)
        lift = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Describe a lift."}],
            response_model=Lift,
            max_tokens=300,
            max_retries=0,
        )
        assert 1 <= lift.chairs <= 99


if __name__ == "__main__":
    exercise(sys.argv[1], sys.argv[2])
    print("ok")
