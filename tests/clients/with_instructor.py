"""Ask a running server through instructor; `test_instructor` runs this in an environment of its own.

python with_instructor.py URL MODEL        (knows nothing of TokenMill; fails where an answer is not of its class)
"""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=12)
    unit: Literal["C", "F"]


def main(url: str, model: str) -> None:
    """Extract a `Weather` in each of the ways that instructor knows for OpenAI's API."""
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
        found = client.chat.completions.create(
            model=model,
            response_model=Weather,
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            max_tokens=200,
            temperature=0.0,
            max_retries=0,
        )
        assert isinstance(found, Weather), found
        print(mode.value, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
