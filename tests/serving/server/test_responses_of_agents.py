"""Requests of coding agents to /v1/responses get the answers that agents read; the stub engine repeats the prompt."""

import json

import openai
import pytest

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.asked_responses import create
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.core.answer import AnswerPiece, PieceKind
from tokenmill.core.errors import InvalidRequest, PromptTooLong
from tokenmill.core.messages import TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.serving.server.generation.writer import UsageCounter
from tokenmill.serving.server.openai.response_events import ResponseWriter, failed
from tokenmill.serving.server.openai.response_tools import custom_arguments, custom_input, flat_name, read_tools
from tokenmill.serving.server.openai.response_truncation import split_turns
from tokenmill.serving.server.openai.responses_body import input_messages, with_instructions

PLACE = {"type": "object", "properties": {"at": {"type": "string"}}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
SPACE = {"type": "namespace", "name": "mcp__mill", "tools": [{"type": "function", "name": "look", "parameters": PLACE}]}
SEARCH = {"type": "web_search", "external_web_access": False}
TEXT = '*** Begin Patch\n+a "line"\n*** End Patch'


def written(name, **arguments):
    return "so <tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("models") / "echo", byte_level_tokenizer(), config={"stub": {}})


@pytest.fixture(scope="module")
def server(model):
    with start_server(EngineConfig(model=str(model)), tool_call_parser="hermes") as running:
        yield running


def raw(server, **fields):
    return server.post("/v1/responses", {"model": "echo", "input": "hello", "max_output_tokens": 4} | fields)


def test_a_call_of_a_namespace_gets_both_names_back(responses):
    fields = {"input": written("mcp__mill__look", at="it"), "tools": [SPACE], "max_output_tokens": 90}
    call = next(item for item in create(responses, **fields).output if item.type == "function_call")
    assert (call.name, call.namespace) == ("look", "mcp__mill")
    assert json.loads(call.arguments) == {"at": "it"}
    *_, end = create(responses, stream=True, **fields)
    assert [(item.name, item.namespace) for item in end.response.output if item.type == "function_call"] == [
        ("look", "mcp__mill")
    ]


def test_a_custom_tool_gets_its_raw_text(responses):
    fields = {"input": written("apply_patch", input=TEXT), "tools": [PATCH | {"format": LARK}]}
    fields["max_output_tokens"] = 150
    call = next(item for item in create(responses, **fields).output if item.type == "custom_tool_call")
    assert (call.name, call.input) == ("apply_patch", TEXT)
    events = list(create(responses, stream=True, **fields))
    place = next(i for i, event in enumerate(events) if getattr(event, "item", None) and event.item.id[:4] == "ctc_")
    kinds = [event.type for event in events[place : place + 4]]
    assert kinds == [
        "response.output_item.added", "response.custom_tool_call_input.delta", "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]  # fmt: skip
    assert events[place].item.input == ""
    assert {events[place + 1].delta, events[place + 2].input, events[place + 3].item.input} == {TEXT}


def test_the_input_of_a_custom_tool_is_held_to_a_regular_expression_and_shown_a_grammar():
    regex = PATCH | {"format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
    (function,) = read_tools([regex]).functions
    assert function["function"]["parameters"]["properties"] == {"input": {"type": "string", "pattern": "^(?:a+)$"}}
    (function,) = read_tools([PATCH | {"format": LARK}]).functions
    assert function["function"]["description"] == (
        'Edit files.\n\nThe input follows this grammar (Lark):\nstart: "*** Begin Patch"'
        "\n\nThe raw text is the argument `input`."
    )


@pytest.mark.parametrize("tool", [
    {"type": "namespace", "name": "x"},
    {"type": "namespace", "name": "", "tools": []},
    {"type": "namespace", "name": "x", "tools": ["y"]},
    {"type": "function"},
    PATCH | {"format": "lark"},
    PATCH | {"format": {"type": "grammar", "syntax": "lark"}},
    PATCH | {"format": {"type": "grammar", "syntax": "gbnf", "definition": "x"}},
])  # fmt: skip
def test_a_tool_without_its_parts_is_refused(tool):
    with pytest.raises(InvalidRequest, match=r"tools\[0\]"):
        read_tools([tool])


def test_names_are_short_and_stay_apart():
    assert flat_name("look", "functions") == flat_name("look") == "look"
    assert flat_name("look", "mcp__mill") == "mcp__mill__look"
    long = [flat_name("look_at_the_wheel", f"mcp__{letter * 60}") for letter in "ab"]
    assert len({*long, flat_name("a b", "x"), flat_name("a_b", "x")}) == 4
    assert {len(name) for name in long} == {64}
    assert long[0] == flat_name("look_at_the_wheel", "mcp__" + "a" * 60), "the same in the next call"


def test_cut_arguments_of_a_custom_tool_stay_visible():
    assert custom_input(custom_arguments(TEXT)) == TEXT
    assert custom_input('{"input": "*** Beg') == '{"input": "*** Beg'
    assert custom_input("") == custom_input("{}") == ""
    assert custom_input('{"input": 3}') == "3"


def test_what_no_model_here_can_call_is_left_out_and_named(server):
    reply = raw(server, tools=[SEARCH, SPACE], include=["web_search_call.results"])
    assert reply.status_code == 200
    assert reply.headers["x-tokenmill-ignored"] == "tools[0]:web_search, include:web_search_call.results"
    items = [{"type": "web_search_call", "id": "ws_1"}, {"role": "user", "content": "hello"}]
    reply = raw(server, input=items, what=1)
    assert reply.headers["x-tokenmill-ignored"] == "what, input[0]:web_search_call"


def test_a_strict_server_leaves_nothing_out(model):
    hello = {"role": "user", "content": "hello"}
    with start_server(EngineConfig(model=str(model)), tool_call_parser="hermes", strict_fields=True) as strict:
        for fields in ({"tools": [SEARCH]}, {"input": [{"type": "web_search_call"}, hello]}, {"include": ["x"]}):
            reply = raw(strict, **fields)
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(fields)))
        asked = {"model": "echo", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        tool = {"type": "web_search_20250305", "name": "web_search"}
        assert strict.post("/v1/messages", asked | {"tools": [tool]}).status_code == 400
        assert raw(strict, client_metadata={"x": "y"}, top_logprobs=0, prompt_cache_key="k").status_code == 200


def test_messages_leave_out_what_belongs_to_anthropics_servers(server):
    content = [
        {"type": "text", "text": "hi"},
        {"type": "server_tool_use", "id": "x"},
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "x"}]},
    ]
    asked = {"model": "echo", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    tool = {"type": "web_search_20250305", "name": "web_search"}
    reply = server.post("/v1/messages?beta=true", asked | {"tools": [tool]})
    assert reply.status_code == 200
    assert reply.headers["x-tokenmill-ignored"] == (
        "tools[0]:web_search_20250305, messages[0].content[1]:server_tool_use, messages[0].content[2]:tool_reference"
    )


def test_a_newer_word_for_an_effort_is_left_out_and_named(server):
    reply = raw(server, reasoning={"effort": "ultra"})
    assert (reply.status_code, reply.headers["x-tokenmill-ignored"]) == (200, "reasoning.effort:ultra")
    assert raw(server, reasoning={"effort": "max"}).status_code == raw(server, reasoning={"effort": "low"}).status_code
    assert raw(server, reasoning={"effort": 4}).status_code == 400


def test_the_tokens_of_an_input_are_counted(server, responses):
    fields = {"input": "hello there", "instructions": "be brief", "tools": [SPACE, PATCH]}
    counted = responses.input_tokens.count(model="echo", **fields)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == create(responses, **fields).usage.input_tokens
    assert counted.input_tokens > responses.input_tokens.count(model="echo", input="hello there").input_tokens


def test_the_oldest_turns_give_way_where_the_client_allows_it(server, responses):
    most = server.http.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    turn = [{"role": "user", "content": "x" * (most // 8)}, {"role": "assistant", "content": "y"}]
    given = [{"role": "system", "content": "be brief"}, *(turn * 12), {"role": "user", "content": "last"}]
    fields = {"input": given, "max_output_tokens": 4}
    with pytest.raises(openai.BadRequestError, match="context length"):
        create(responses, **fields)
    response = create(responses, truncation="auto", **fields)
    assert response.truncation == "auto"
    dropped = response.dropped_turns
    assert 5 < dropped < 12
    same = [given[0], *given[1 + 2 * dropped :]]
    assert responses.input_tokens.count(model="echo", input=same).input_tokens == response.usage.input_tokens
    more = responses.input_tokens.count(model="echo", input=[given[0], *given[2 * dropped - 1 :]]).input_tokens
    assert more > most - 4, "no more than necessary"
    with pytest.raises(openai.BadRequestError, match="context length"):
        create(responses, truncation="auto", input="x" * most)
    assert not hasattr(create(responses, truncation="auto"), "dropped_turns")


def test_a_turn_begins_where_the_user_speaks():
    roles = ["system", "user", "user", "assistant", "tool", "assistant", "user"]
    system, turns = split_turns([{"role": role} for role in roles])
    assert [one["role"] for one in system] == ["system"]
    assert [[one["role"] for one in turn] for turn in turns] == [roles[1:6], ["user"]]
    assert split_turns([{"role": "assistant"}, {"role": "user"}])[1] == [[{"role": "assistant"}], [{"role": "user"}]]


def test_what_is_said_between_a_call_and_its_result_joins_the_call():
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": TEXT}
    given = [
        {"role": "user", "content": "go"},
        call,
        {"role": "assistant", "content": [{"type": "output_text", "text": "I patch."}]},
        {"type": "function_call", "call_id": "c2", "name": "look", "namespace": "mcp__mill", "arguments": "{}"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
    ]
    _, assistant, tool = input_messages(given)
    assert assistant["content"] == "I patch."
    names = [(one["function"]["name"], one["function"]["arguments"]) for one in assistant["tool_calls"]]
    assert names == [("apply_patch", custom_arguments(TEXT)), ("mcp__mill__look", "{}")]
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "done"}


def test_system_texts_at_the_beginning_are_one():
    given = input_messages([{"role": "developer", "content": "b"}, {"role": "system", "content": "c"}])
    assert with_instructions("a", given) == [{"role": "system", "content": "a\n\nb\n\nc"}]
    assert with_instructions("a", [{"role": "user", "content": "b"}])[0] == {"role": "system", "content": "a"}


def test_thinking_comes_in_a_form_to_send_back_if_asked_for():
    output = TextOutput("x", "", [1], 5, 0, FinishReason.STOP, answer=[AnswerPiece(PieceKind.REASONING, "hm")])
    for encrypts in (True, False):
        kept = []
        usage = UsageCounter(1)
        usage.add(0, output)
        ResponseWriter({}, kept.append, {}, encrypts).document({0: output}, usage)
        assert ("encrypted_content" in kept[0]["output"][0]) is encrypts


def test_a_failure_has_the_code_by_which_agents_decide_to_try_again():
    assert failed({}, PromptTooLong("too long"))["error"]["code"] == "context_length_exceeded"
    assert failed({}, RuntimeError("x"))["error"]["code"] == "server_error"
