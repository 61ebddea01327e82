"""anthropic, the Python client."""

import anthropic
from report import MODEL, URL, call

client = anthropic.Anthropic(base_url=URL, api_key="none")
ASK = [{"role": "user", "content": "What is a page?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}


@call("messages")
def _() -> object:
    return client.messages.create(model=MODEL, messages=ASK, max_tokens=16).content[0].text


@call("messages, streamed")
def _() -> object:
    with client.messages.stream(model=MODEL, messages=ASK, max_tokens=16) as stream:
        return "".join(stream.text_stream) and stream.get_final_message().usage.output_tokens == 16


@call("tools")
def _() -> object:
    tool = {"name": "weather", "description": "today's", "input_schema": SCHEMA}
    answer = client.messages.create(
        model=MODEL, messages=ASK, max_tokens=64, tools=[tool], tool_choice={"type": "tool", "name": "weather"}
    )
    return [part.input["city"] for part in answer.content if part.type == "tool_use"]


@call("count_tokens")
def _() -> object:
    return client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens
