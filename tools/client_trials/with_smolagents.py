"""smolagents: its model class, and its two kinds of agents."""

from report import BASE, MODEL, call
from smolagents import CodeAgent, MultiStepAgent, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.utils import AgentGenerationError

model = OpenAIServerModel(model_id=MODEL, api_base=BASE, api_key="none", max_tokens=128)
ASK = [{"role": "user", "content": [{"type": "text", "text": "What is a page?"}]}]


@tool
def double(number: int) -> int:
    """Double a number.

    Args:
        number: what is doubled.
    """
    return 2 * number


@call("generate")
def _() -> object:
    return model.generate(ASK).content


@call("generate_stream")
def _() -> object:
    return [delta.content for delta in model.generate_stream(ASK)]


@call("generate with tools")
def _() -> object:
    return model.generate(ASK, tools_to_call_from=[double]).tool_calls[0].function.name == "double"


def one_step(agent: MultiStepAgent) -> object:
    """Return True if one step of an agent got an answer from the model, whatever the demo model answers."""
    agent.run("Double 4.")
    errors = [step.error for step in agent.memory.steps if getattr(step, "error", None)]
    for error in errors:
        if isinstance(error, AgentGenerationError):
            raise error
    return True


@call("ToolCallingAgent, one step")
def _() -> object:
    return one_step(ToolCallingAgent(tools=[double], model=model, max_steps=1, verbosity_level=0))


@call("CodeAgent, one step")
def _() -> object:
    return one_step(CodeAgent(tools=[], model=model, max_steps=1, verbosity_level=0))
