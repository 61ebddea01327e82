"""instructor, over the openai client."""

import instructor
import openai
from pydantic import BaseModel
from report import BASE, MODEL, call

ASK = [{"role": "user", "content": "Is a page shared?"}]


class Verdict(BaseModel):
    """The verdict on whether a page is shared."""

    shared: bool


def ask(mode: instructor.Mode) -> object:
    """The verdict, asked for in one of instructor's modes."""
    client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key="none"), mode=mode)
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, response_model=Verdict, max_retries=0, max_tokens=64
    )
    return isinstance(answer, Verdict)


@call("tools mode")
def _() -> object:
    return ask(instructor.Mode.TOOLS)


@call("JSON schema mode")
def _() -> object:
    return ask(instructor.Mode.JSON_SCHEMA)


@call("strict tools mode")
def _() -> object:
    return ask(instructor.Mode.TOOLS_STRICT)
