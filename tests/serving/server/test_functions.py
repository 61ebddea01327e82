"""Chats in the form that came before tools: `functions` and `function_call`; the stub engine repeats the prompt."""

import json
from typing import Any

import openai
import pytest

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.core.answer import AnswerPiece, PieceKind
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.serving.server.generation.tools import NamedTool
from tokenmill.serving.server.openai.functions import FunctionChoices, choice_of, messages_with_tools

LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
CALL = {"name": "look", "arguments": '{"at": "it"}'}
WRITTEN = 'so <tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
ASKED = [{"role": "user", "content": WRITTEN}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("models") / "echo", byte_level_tokenizer(), config={"stub": {}})
    with start_server(EngineConfig(model=str(folder)), tool_call_parser="hermes") as running:
        yield running


def chat(server, **fields):
    body = {"model": "echo", "messages": ASKED, "functions": [LOOK], "max_tokens": 100} | fields
    return server.client.chat.completions.create(**body)


def test_a_call_is_named_as_it_was_before_tools(server):
    choice = chat(server).choices[0]
    assert choice.message.function_call.name == "look"
    assert json.loads(choice.message.function_call.arguments) == {"at": "it"}
    assert choice.message.tool_calls is None


def test_a_stream_brings_the_same_call(server):
    choices = [chunk.choices[0] for chunk in chat(server, stream=True) if chunk.choices]
    parts = [choice.delta.function_call for choice in choices if choice.delta.function_call is not None]
    assert [part.name for part in parts if part.name] == ["look"]
    assert json.loads("".join(part.arguments or "" for part in parts)) == {"at": "it"}
    assert not any(choice.delta.tool_calls for choice in choices)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"function_call": "sometimes"}, "function_call"),
        ({"function_call": {"name": 5}}, "function_call"),
        ({"function_call": {"name": "hear"}}, "function_call"),
        ({"functions": [], "function_call": {"name": "look"}}, "function_call"),
        ({"functions": [{"parameters": {}}]}, "functions"),
        ({"functions": "look"}, "functions"),
        ({"tools": [{"type": "function", "function": LOOK}]}, "functions"),
        ({"functions": [LOOK, LOOK]}, "tools"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(server, fields: dict[str, Any], param: str):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(server, **fields)
    assert refused.value.param == param


def test_none_calls_nothing_and_no_functions_are_no_functions(server):
    for fields in ({"function_call": "none"}, {"functions": [], "function_call": "auto"}):
        choice = chat(server, **fields).choices[0]
        assert choice.message.function_call is None
        assert "<tool_call>" in choice.message.content


def test_a_session_keeps_calls_of_tools_only(server):
    opened = server.post("/v1/sessions", {"kind": "chat"}).json()["id"]
    reply = server.post(f"/v1/sessions/{opened}/input", {"messages": ASKED, "functions": [LOOK]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "functions")


def test_calls_of_earlier_turns_and_their_results_are_those_of_tools():
    asked = {"role": "user", "content": "look"}
    called = {"role": "assistant", "content": None, "function_call": CALL}
    told = {"role": "function", "name": "look", "content": "nothing"}
    found = messages_with_tools([asked, called, told, called, told, {"role": "function", "name": "x", "content": ""}])
    assert found[0] is asked
    assert "function_call" not in found[1]
    assert [message["tool_calls"][0]["id"] for message in (found[1], found[3])] == ["call_1", "call_3"]
    assert [(message["role"], message["tool_call_id"]) for message in (found[2], found[4], found[5])] == [
        ("tool", "call_1"),
        ("tool", "call_3"),
        ("tool", "call_5"),
    ]
    assert found[1]["tool_calls"][0]["function"] == CALL


def test_a_choice_names_a_tool():
    assert choice_of({"name": "look"}, [LOOK]) == NamedTool("look")
    assert [choice_of(one, [LOOK]) for one in (None, "auto", "none")] == [None, "auto", "none"]
    with pytest.raises(InvalidRequest):
        choice_of("required", [LOOK])


def test_parts_of_a_call_that_come_at_once_are_one():
    pieces = [AnswerPiece(PieceKind.CALL, "{", "look"), AnswerPiece(PieceKind.CALL, "}")]
    for reason, shown in ((FinishReason.STOP, "function_call"), (FinishReason.LENGTH, "length")):
        output = TextOutput("a", "", [1], 1, 0, finish_reason=reason, answer=pieces)
        (choice,) = FunctionChoices().chunk_choices(0, output)
        assert (choice.delta.function_call.name, choice.delta.function_call.arguments) == ("look", "{}")
        assert choice.finish_reason == shown
