"""Answer bad requests with a 4xx in OpenAI's form, and serve all other clients as if nothing had happened."""

import concurrent.futures
import json
import random
import socket
from urllib.parse import urlsplit

import pytest

from tokenmill.serving.server.http.body import MAX_BODY_BYTES

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"messages": MESSAGES, "max_tokens": 3}
TEXT = {"prompt": "hello", "max_tokens": 3}
NUMBERS = [
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "priority", "timeout",
]  # fmt: skip
ODD = [True, "1", [], {}, [1], {"a": 1}, -(10**30)]
OUT_OF_RANGE = {
    "n": [0, -1, 129, 2**31, 2**63],
    "max_tokens": [0, -1, 2**31, 2**63],
    "min_tokens": [-1, 4, 2**31],
    "temperature": [-0.1, 2.1, 1e308],
    "top_p": [0, -1, 1.1],
    "top_k": [-2, 2**31, 1.5],
    "min_p": [-0.1, 1.1],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1],
    "seed": [2**63, -(2**63) - 1, 1.5],
    "priority": [2**31, 0.5],
    "timeout": [0, -1, 10**9],
    "stop": [["a", "b", "c", "d", "e"], "", [""], ["a", 1], {"a": 1}, 5, "x" * 2000],
    "stop_token_ids": [[-1], [2**31], [512], ["1"], [True], 5, list(range(200))],
    "logit_bias": [
        {"512": 1},
        {"-1": 1},
        {"a": 1},
        {"1.5": 1},
        {"1": "x"},
        {"1": True},
        {"9" * 30: 1},
        [1],
        {"\uff11": 1},
    ],
    "stream": ["yes", 1, []],
    "ignore_eos": ["yes", 1],
    "cache_salt": [1, "x" * 300],
    "model": [1, "other", ""],
    "stream_options": [{"include_usage": True}, 1, {"foo": 1}],
    "request_id": [5, "x" * 129, "a b", "a\n", "a\nb", "a\x1b[31m", "a\x00", "\xe9"],
}
UNSUPPORTED = {
    "best_of": 2,
    "prediction": "end",
    "response_format": {"type": "grammar"},
    "structured_outputs": {"xgrammar": {}},
    "chat_template": "{{ messages }}",
    "detokenize": False,
    "length_penalty": 2.0,
    "kv_transfer_params": {"do_remote_decode": True},
    "max_token": 3,
    "priority": 1,
    "use_beam_search": True,
    "return_hidden_states": True,
    "separate_reasoning": False,
}
BAD_CHATS = {
    "messages": [
        None, "hello", {}, [], [1], [{}], [{"role": "user"}], [{"role": 1, "content": "a"}], [[]],
        [{"role": "user", "content": 5}], [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": ["a"]}], [{"role": "user", "content": [{"type": "text"}]}],
    ],
    "tools": [1, [1], {}],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}, 5],
    "top_logprobs": [1, -1],
    "logprobs": [1, "yes"],
    "chat_template_kwargs": [1, [], "a", {"x": 10**40}],
    "max_completion_tokens": [0, -1, "3", True],
}  # fmt: skip
BAD_PROMPTS = [
    None, "", [], [""], ["a", ""], [[]], [1, "a"], ["a", 1], [1, [2]], [-1], [512], [2**31], [2**63], [10**30], [1.5],
    [True], [[1, -1]], 5, {}, [None], ["a"] * 257, "z" * 200_000, [5] * 512,
]  # fmt: skip


def assert_refused(reply, param=None, statuses=(400,)):
    assert reply.status_code in statuses, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in reply.text
    assert "/src/" not in reply.text
    assert "/tmp" not in reply.text
    if param is not None:
        assert error["param"] == param, reply.text


@pytest.fixture(autouse=True)
def bystander(echo_server):
    """A stream that runs while bad requests come in, and must not notice them."""
    body = {"messages": MESSAGES, "max_tokens": 60}
    alone = echo_server.post("/v1/chat/completions", body)
    assert alone.status_code == 200, f"{alone.text}\n{echo_server.output()}"
    expected = alone.json()["choices"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reply = pool.submit(echo_server.post, "/v1/chat/completions", body)
        yield
        assert reply.result().json()["choices"] == expected
    assert echo_server.post("/v1/completions", TEXT).status_code == 200
    echo_server.wait_until_unused()


@pytest.mark.parametrize(("route", "good"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_a_field_of_the_wrong_type_is_named(echo_server, route, good):
    for field in NUMBERS:
        for value in ODD:
            assert_refused(echo_server.post(route, good | {field: value}), field)


@pytest.mark.parametrize(("route", "good"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_a_field_outside_its_range_is_named(echo_server, route, good):
    for field, values in OUT_OF_RANGE.items():
        for value in values:
            assert_refused(echo_server.post(route, good | {field: value}), field, (400, 404))


@pytest.mark.parametrize(("route", "good"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
def test_what_is_not_supported_is_refused_by_name(echo_server, route, good):
    for field, value in UNSUPPORTED.items():
        assert_refused(echo_server.post(route, good | {field: value}), field)


def test_a_chat_has_no_echo(echo_server):
    assert_refused(echo_server.post("/v1/chat/completions", CHAT | {"echo": True}), "echo")


def test_fields_that_ask_for_nothing_special_are_accepted(echo_server):
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "echo": False, "best_of": 1,
        "response_format": {"type": "text"}, "logit_bias": {"5": 1000}, "stop": None, "seed": None, "top_k": -1,
        "verbosity": "low", "use_beam_search": False, "detokenize": True, "length_penalty": 1.0, "documents": None,
        # vLLM's router writes these into every body that it passes on.
        "no_stop_trim": False, "return_hidden_states": False, "separate_reasoning": True, "stream_reasoning": True,
    }  # fmt: skip
    for route, good in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        assert echo_server.post(route, good | harmless).status_code == 200


def test_harmless_fields_of_other_apis_are_accepted(echo_server):
    claude = {"model": "echo", "max_tokens": 3, "messages": MESSAGES}
    harmless = {
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}, "container": None, "mcp_servers": [],
        "output_config": {"effort": "high"}, "metadata": {"user_id": "u"},
    }  # fmt: skip
    assert echo_server.post("/v1/messages", claude | harmless).status_code == 200
    for field, value in {"container": "c", "mcp_servers": [{"url": "https://x"}]}.items():
        assert field in echo_server.post("/v1/messages", claude | {field: value}).json()["error"]["message"]
    response = {"input": "hello", "max_output_tokens": 3, "context_management": [], "text": {"verbosity": "low"}}
    assert echo_server.post("/v1/responses", response).status_code == 200
    assert echo_server.post("/v1/chat/completions", CHAT | {"include_reasoning": True}).status_code == 200


def test_bad_chats_are_refused_by_field(echo_server):
    for field, values in BAD_CHATS.items():
        for value in values:
            param = None if field == "chat_template_kwargs" else field
            assert_refused(echo_server.post("/v1/chat/completions", CHAT | {field: value}), param)


def test_bad_prompts_are_refused(echo_server):
    for prompt in BAD_PROMPTS:
        assert_refused(echo_server.post("/v1/completions", TEXT | {"prompt": prompt}), "prompt")
    assert_refused(echo_server.post("/v1/completions", {"max_tokens": 3}), "prompt")
    assert_refused(echo_server.post("/v1/chat/completions", {"max_tokens": 3}), "messages")
    assert_refused(echo_server.post("/v1/completions", TEXT | {"prompt": ["a"] * 200, "n": 100}), "n")
    assert_refused(echo_server.post("/detokenize", {"tokens": [512]}), "tokens")
    assert_refused(echo_server.post("/tokenize", {}))


NOT_REQUESTS = [
    b"", b"{", b"null", b"[]", b"5", b'"a"', b"\xff\xfe", b'{"messages": NaN}', b"\x00" * 100,
    b'{"temperature": NaN, "prompt": "a"}', b'{"temperature": Infinity, "prompt": "a"}',
    b'{"temperature": 1e999, "prompt": "a"}',
    b'{"prompt": ' + b"[" * 50_000, b'{"messages": [{"role": "user", "content": ' + b"[" * 50_000,
    *(
        b'{"messages": [{"role": "user", "content": "a"}], "tools": [' + b'{"a":' * n + b"1" + b"}" * n + b"]}"
        for n in (100, 900, 100_000)
    ),
]  # fmt: skip


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_body_that_is_no_request_is_refused(echo_server, route):
    for raw in NOT_REQUESTS:
        assert_refused(echo_server.post(route, content=raw), statuses=(400, 413))


def test_random_bytes_and_mutated_bodies_are_never_a_server_error(echo_server):
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    good = json.dumps(CHAT | {"stop": ["a"], "logit_bias": {"5": 1}, "seed": 3}).encode()
    for _ in range(100):
        raw = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        reply = echo_server.post("/v1/chat/completions", content=bytes(raw))
        assert reply.status_code in (200, 400, 404), f"seed {seed}: {bytes(raw)!r}: {reply.text}"


def test_a_body_over_the_limit_is_413_declared_or_not(echo_server):
    assert_refused(echo_server.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1)), statuses=(413,))
    chunks = (b" " * 2**20 for _ in range(MAX_BODY_BYTES // 2**20 + 1))
    assert_refused(echo_server.post("/v1/completions", content=chunks), statuses=(413,))


def test_headers_over_the_limit_are_431(echo_server):
    headers = {f"X-Filler-{i}": "x" * 1000 for i in range(40)}
    assert_refused(echo_server.post("/v1/completions", TEXT, headers=headers), statuses=(431,))


def test_unknown_routes_and_methods_have_openai_bodies(echo_server):
    assert_refused(echo_server.post("/v1/nothing", {}), statuses=(404,))
    assert_refused(echo_server.post("/v1/models", {}), statuses=(405,))


def test_a_client_that_leaves_while_sending_its_body_is_nothing_to_note(echo_server):
    address = urlsplit(echo_server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 1000\r\n\r\n{")
    assert echo_server.post("/v1/completions", TEXT).status_code == 200
    assert "Traceback" not in echo_server.output()
