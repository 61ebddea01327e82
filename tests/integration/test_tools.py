"""Tools and thinking against the served demo model, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.integration.serving import MODEL_NAME, serve
from tests.serving.server.running_server import RunningServer
from tokenmill.demo import demo_model_path

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "get_time": CLOCK}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serve(demo_model_path(), "--num-pages", "400", "--max-num-seqs", "8") as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "messages": QUESTION, "max_tokens": 120, "temperature": 1.0, "seed": 7, **fields}


def check_call(call: Any) -> None:
    assert call.id.startswith("call_")
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_required_tools_are_called(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(**chat(tools=TOOLS, tool_choice="required", n=6, parallel_tool_calls=False))
    for choice in reply.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert choice.message.tool_calls is not None and len(choice.message.tool_calls) == 1
        check_call(choice.message.tool_calls[0])
    assert len({choice.message.tool_calls[0].id for choice in reply.choices}) == 6  # type: ignore[index]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_tool_is_called(client: openai.OpenAI, name: str) -> None:
    choice: Any = {"type": "function", "function": {"name": name}}
    reply = client.chat.completions.create(**chat(tools=TOOLS, tool_choice=choice))
    calls = reply.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == [name]
    check_call(calls[0])


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_calls_that_the_model_decides_on_match_their_schema(client: openai.OpenAI, temperature: float) -> None:
    """The question names a city that the schema does not have."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": schema, "strict": True}}]
    reply = client.chat.completions.create(**chat(tools=tools, n=24, temperature=temperature))
    calls = [call for choice in reply.choices for call in choice.message.tool_calls or ()]
    assert len(calls) > 6
    for call in calls:
        assert json.loads(call.function.arguments) in ({"city": "Oslo"}, {"city": "Rome"})
    assert not any("<tool" in (choice.message.content or "") for choice in reply.choices)


def test_streamed_deltas_add_up_to_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**chat(tools=TOOLS, tool_choice="required")) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    calls = final.choices[0].message.tool_calls or []
    assert calls
    for call in calls:
        check_call(call)
        parts = [delta.arguments_delta for delta in deltas if delta.index == call.index]
        assert "".join(parts) == call.function.arguments, "of as many deltas as the machine had time for"
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    "notation", ["llama3_json", "mistral", "pythonic", "qwen3_coder", "lfm2", "granite", "phi4_mini_json", "gemma4"]
)
def test_the_other_notations_stream_calls_too(notation: str) -> None:
    flags = ("--num-pages", "400", "--max-num-seqs", "8", "--tool-call-parser", notation, "--enable-auto-tool-choice")
    with serve(demo_model_path(), *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        fields = chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=4)
        whole = client.chat.completions.create(**fields)
        streamed: dict[tuple[int, int], list[str]] = {}
        for chunk in client.chat.completions.create(**fields, stream=True):
            for choice in chunk.choices:
                for delta in choice.delta.tool_calls or ():
                    name, text = delta.function.name, delta.function.arguments
                    streamed.setdefault((choice.index, delta.index), []).extend(filter(None, (name, text)))
    calls: Any = {
        (choice.index, index): call
        for choice in whole.choices
        for index, call in enumerate(choice.message.tool_calls or ())
    }
    assert {place: (pieces[0], "".join(pieces[1:])) for place, pieces in streamed.items()} == {
        place: (call.function.name, call.function.arguments) for place, call in calls.items()
    }
    ended = [choice for choice in whole.choices if choice.finish_reason == "tool_calls"]
    assert ended
    for choice in ended:
        for call in choice.message.tool_calls or ():
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_round_trip_of_a_tool(client: openai.OpenAI) -> None:
    asked = client.chat.completions.create(**chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False))
    message = asked.choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"degrees": 21}'}
    messages: Any = [*QUESTION, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**chat(messages=messages, tools=TOOLS, temperature=0.0))
    assert answer.choices[0].finish_reason in ("stop", "tool_calls", "length")
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


def test_auto_and_none(client: openai.OpenAI) -> None:
    auto = client.chat.completions.create(**chat(tools=TOOLS, temperature=0.0))
    for call in auto.choices[0].message.tool_calls or []:
        json.loads(call.function.arguments)
    none = client.chat.completions.create(**chat(tools=TOOLS, tool_choice="none"))
    assert none.choices[0].message.tool_calls is None


def test_an_answer_with_tools_may_have_a_schema_too(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    format: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
    }
    reply = client.chat.completions.create(**chat(tools=TOOLS, response_format=format, n=8))
    for choice in reply.choices:
        if choice.message.tool_calls:
            assert not choice.message.content
        elif choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content or ""), schema)


def test_thinking_comes_apart_and_the_schema_holds_after_it(client: openai.OpenAI) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["left", "right"]}}}
    fields = chat(response_format=format, reasoning_effort="high", max_tokens=400, n=4)
    reply = client.chat.completions.create(**fields)
    for choice in reply.choices:
        if choice.finish_reason == "stop":
            assert json.loads(choice.message.content or "") in ("left", "right")
        assert "<think>" not in (choice.message.content or "")
    assert reply.usage is not None
    details = reply.usage.completion_tokens_details
    assert details is not None
    assert 0 < (details.reasoning_tokens or 0) < reply.usage.completion_tokens
    streamed: dict[int, tuple[str, str]] = {}
    for chunk in client.chat.completions.create(**fields, stream=True):
        for part in chunk.choices:
            reasoning, content = streamed.get(part.index, ("", ""))
            delta = part.delta.model_dump()
            assert delta.get("reasoning") == delta.get("reasoning_content")
            streamed[part.index] = reasoning + (delta.get("reasoning") or ""), content + (part.delta.content or "")
    whole = {
        choice.index: (choice.message.model_dump().get("reasoning") or "", choice.message.content or "")
        for choice in reply.choices
    }
    assert streamed == whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": []}}}] * 2}, "tools"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)
def test_what_is_not_understood_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**chat(**fields))
    assert caught.value.body["param"] == param  # type: ignore[index]


def test_the_asynchronous_client_and_many_calls_at_once(server: RunningServer) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = [
                client.chat.completions.create(**chat(tools=TOOLS, tool_choice="required", seed=n)) for n in range(12)
            ]
            for reply in await asyncio.gather(*asked):
                if reply.choices[0].finish_reason == "tool_calls":
                    for call in reply.choices[0].message.tool_calls or []:
                        check_call(call)

    asyncio.run(run())
