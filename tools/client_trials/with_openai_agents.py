"""openai-agents, over chat completions and over responses."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from report import BASE, MODEL, call

set_tracing_disabled(True)


class Verdict(BaseModel):
    """The verdict on whether a page is shared."""

    shared: bool


@function_tool
def double(number: int) -> int:
    """Double a number."""
    return 2 * number


def agent(kind: type = OpenAIChatCompletionsModel, **how: object) -> Agent:
    """One that asks our server. Each has a client of its own: every run has an event loop of its own."""
    model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=BASE, api_key="none"))
    settings = how.pop("settings", ModelSettings(max_tokens=64))
    return Agent(name="miller", instructions="Answer.", model=model, model_settings=settings, **how)


@call("chat completions")
def _() -> object:
    return Runner.run_sync(agent(), "What is a page?").final_output


@call("responses")
def _() -> object:
    return Runner.run_sync(agent(OpenAIResponsesModel), "What is a page?").final_output


@call("output_type")
def _() -> object:
    return isinstance(Runner.run_sync(agent(output_type=Verdict), "Is a page shared?").final_output, Verdict)


@call("function_tool")
def _() -> object:
    settings = ModelSettings(max_tokens=64, tool_choice="required")
    result = Runner.run_sync(agent(tools=[double], settings=settings), "Double 4.", max_turns=4)
    return [item for item in result.new_items if item.type == "tool_call_output_item"]
