"""pydantic-ai."""

import asyncio

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import BASE, MODEL, call

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key="none"))
SETTINGS = {"max_tokens": 64}


class Verdict(BaseModel):
    """The verdict on whether a page is shared."""

    shared: bool


@call("run")
def _() -> object:
    return Agent(model, model_settings=SETTINGS).run_sync("What is a page?").output


@call("run_stream")
def _() -> object:
    async def read() -> list[str]:
        async with Agent(model, model_settings=SETTINGS).run_stream("What is a page?") as result:
            return [text async for text in result.stream_text(delta=True)]

    return asyncio.run(read())


@call("output through a tool")
def _() -> object:
    return isinstance(Agent(model, output_type=Verdict).run_sync("Is a page shared?").output, Verdict)


@call("native output")
def _() -> object:
    return isinstance(Agent(model, output_type=NativeOutput(Verdict)).run_sync("Is a page shared?").output, Verdict)
