"""Fields that the server does not know: other servers' names are read, the rest is left out and named."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import Any

import msgspec
import pytest

from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.server.anthropic.body import MessagesBody
from tokenmill.serving.server.http.dialects import FOREIGN, SYNONYMS
from tokenmill.serving.server.http.unknown_fields import MOST_FIELDS, UnknownFields, header_of
from tokenmill.serving.server.openai.chat import ChatBody
from tokenmill.serving.server.openai.responses_body import ResponsesBody

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"messages": MESSAGES, "max_tokens": 3}


def taken(kind: Any = ChatBody, /, **fields: Any) -> Any:
    needed = {"input": "x"} if kind is ResponsesBody else {"messages": MESSAGES}
    return UnknownFields().convert(json.loads(json.dumps(needed | fields)), kind)


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"n_predict": 7}, "max_tokens", 7),
        ({"n_predict": -1}, "max_tokens", None),
        ({"thinking_budget_tokens": 9}, "thinking_token_budget", 9),
        ({"thinking_budget_tokens": -1}, "thinking_token_budget", None),
        ({"repeat_penalty": 1.1}, "repetition_penalty", 1.1),
        ({"think": False}, "chat_template_kwargs", {"enable_thinking": False}),
        ({"think": "high"}, "reasoning_effort", "high"),
        ({"think": "max"}, "reasoning_effort", "max"),
        ({"stop_sequences": ["a"]}, "stop", ["a"]),
        ({"do_sample": False}, "temperature", 0.0),
        ({"do_sample": False, "temperature": 0.7}, "temperature", 0.0),
        ({"do_sample": True}, "temperature", None),
        ({"do_sample": True, "temperature": 0.7}, "temperature", 0.7),
    ],
)
def test_a_synonym_is_the_field_that_it_means(given: dict[str, Any], field: str, value: Any) -> None:
    found = taken(**given)
    assert getattr(found.body, field) == value
    assert found.ignored == ()


@pytest.mark.parametrize("form", ["json", "regex", "choice", "grammar"])
def test_guided_decoding_of_older_servers_is_structured_output(form: str) -> None:
    value: Any = {"json": {"type": "object"}, "choice": ["a"]}.get(form, "x")
    found = taken(**{f"guided_{form}": value})
    assert getattr(found.body.structured_outputs, form) == value


def test_a_field_of_ours_wins_over_its_synonym() -> None:
    found = taken(max_tokens=3, n_predict=9)
    assert found.body.max_tokens == 3
    assert found.ignored == ("n_predict",)


def test_what_nobody_knows_is_left_out_wherever_it_stands() -> None:
    found = taken(
        options={"a": 1}, keep_alive="5m", stream_options={"foo": 1}, response_format={"type": "text", "b": 2}
    )
    assert set(found.ignored) == {"options", "keep_alive", "stream_options.foo", "response_format.b"}
    assert found.body.stream_options.include_usage is None


def test_a_value_of_a_wrong_type_is_still_refused() -> None:
    for fields in ({"n_predict": "many"}, {"unheard_of": 1, "temperature": "hot"}):
        with pytest.raises(msgspec.ValidationError):
            taken(**fields)


@pytest.mark.parametrize("name", ["temprature", "max_token", "steam", "stopp", "tool_choise", "mesages"])
def test_a_misspelt_field_is_refused_with_the_one_that_was_meant(name: str) -> None:
    with pytest.raises(InvalidRequest, match="did you mean"):
        taken(**{name: 1})


@pytest.mark.parametrize("kind", [ChatBody, ResponsesBody, MessagesBody])
def test_no_name_of_another_server_is_taken_for_a_misspelling(kind: Any) -> None:
    for name in [*FOREIGN, *SYNONYMS]:
        if name not in kind.__struct_fields__:
            # Null is no value of some of the fields that it may mean.
            with contextlib.suppress(msgspec.ValidationError):
                taken(kind, **{name: None}, **({"max_tokens": 1} if kind is MessagesBody else {}))


def test_a_body_of_nothing_but_unknown_fields_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        taken(**{f"field{number}x" * 3: 1 for number in range(MOST_FIELDS + 1)})


def test_a_header_holds_only_what_headers_may() -> None:
    assert header_of(("a", "b.c[0]", "ü\n, x")) == "a, b.c[0], ????x"
    assert len(header_of(("x" * 5000, *["y" * 90] * 50))) <= 1000


def test_the_log_names_them_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    unknown = UnknownFields(clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for second in range(70):
            now[0] = float(second)
            unknown.note(("messages[3].foo",))
    assert [record.message.rsplit(": ", 1)[1] for record in caplog.records] == [
        "messages[].foo (1)",
        "messages[].foo (60)",
    ]


def test_a_reply_names_what_was_left_out(echo_server: Any) -> None:
    for stream in (False, True):
        reply = echo_server.post("/v1/chat/completions", CHAT | {"options": {}, "x_y": 1, "stream": stream})
        assert reply.status_code == 200
        assert reply.headers["x-tokenmill-ignored"] == "options, x_y"
    assert "x-tokenmill-ignored" not in echo_server.post("/v1/chat/completions", CHAT).headers
    reply = echo_server.post("/v1/responses", {"input": "hello", "keep_alive": 5, "max_output_tokens": 3})
    assert reply.status_code == 200 and reply.headers["x-tokenmill-ignored"] == "keep_alive"


def test_operators_routes_know_all_their_fields(echo_server: Any) -> None:
    assert echo_server.post("/abort_request", {"rid": "x", "foo": 1}).status_code in (400, 404)


def test_strict_fields_refuse_what_is_not_known(stub_model: Any) -> None:
    with start_server(EngineConfig(model=str(stub_model)), strict_fields=True) as server:
        for fields in ({"options": {}}, {"n_predict": 3}, {"stream_options": {"foo": 1}}):
            assert server.post("/v1/chat/completions", CHAT | fields).status_code == 400
