"""THREATS row E: a small request cannot cause much work, and a large one is refused before it is held in memory."""

import concurrent.futures
import contextlib
import json
import select
from pathlib import Path

import pytest

from tests.eventually import eventually, patience
from tests.integration.serving import serve
from tests.serving.server.running_server import start_server
from tests.threats.bystander import Bystander
from tests.threats.conftest import KEYS
from tests.threats.raw_http import ask, connect, read_all, status
from tokenmill.config.configs import EngineConfig
from tokenmill.demo import demo_model_path

KEY = f"Authorization: Bearer {KEYS[0]}"
HUGE = 512 * 2**20


@pytest.fixture(params=["guarded_server", "guarded_proxy"], ids=["server", "proxy"])
def guarded(request):
    """A server that takes requests, or the proxy in front of it."""
    return request.getfixturevalue(request.param)


def memory(server) -> int:
    """Bytes that the API process holds."""
    return int(Path(f"/proc/{server.api_pid}/statm").read_text().split()[1]) * 4096


def pour(server, head: bytes, filler: bytes) -> tuple[bytes, int]:
    """Send a head and then filler without end; returns the reply and how many bytes the server took."""
    sent = 0
    with connect(server.url) as connection:
        connection.sendall(head)
        try:
            while sent < HUGE:
                connection.sendall(filler)
                sent += len(filler)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return read_all(connection), sent


@pytest.mark.parametrize(
    "head",
    [b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: ", b"GET /health HTTP/1.1\r\nHost: x\r\n", b"GET /",
     b"GET /health HTTP/1.1\r\nHost: "],
)  # fmt: skip
def test_a_head_without_end_is_cut_off(guarded, head):
    before = memory(guarded)
    filler = b"X-A: b\r\n" * 8192 if head.endswith(b"x\r\n") else b"a" * 65536
    _, sent = pour(guarded, head, filler)
    assert sent < 64 * 2**20, "the server has stopped reading"
    assert memory(guarded) - before < 32 * 2**20
    assert guarded.http.get(f"{guarded.url}/health").status_code == 200


def test_too_large_a_head_is_answered_431(guarded):
    for size, expected in ((20_000, 200), (40_000, 431), (70_000, 431)):
        assert status(ask(guarded.url, "GET", "/health", "X-Long: " + "a" * size)) == expected, size
    many = [f"X-{i}: b" for i in range(5000)]
    reply = ask(guarded.url, "GET", "/health", *many)
    assert status(reply) == 431
    assert b'"type":"invalid_request_error"' in reply


BODIES = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens",
          "/v1/responses", "/generate", "/tokenize", "/detokenize", "/abort_requests"]  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_too_large_a_body_is_refused_before_it_is_read(guarded, path):
    before = memory(guarded)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{KEY}\r\n"
    for length in (f"Content-Length: {HUGE}", "Transfer-Encoding: chunked"):
        filler = b"10000\r\n" + b"a" * 65536 + b"\r\n" if "chunked" in length else b"a" * 65536
        reply, sent = pour(guarded, f"{head}{length}\r\n\r\n".encode(), filler)
        assert status(reply) == 413
        assert sent < 128 * 2**20, "the server has stopped reading"
    assert memory(guarded) - before < 100 * 2**20


def test_without_a_key_not_even_a_small_body_is_read(guarded):
    reply, sent = pour(
        guarded, f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {HUGE}\r\n\r\n".encode(), b"a" * 65536
    )
    assert status(reply) == 401
    assert sent < 128 * 2**20


def test_bodies_on_their_way_have_one_bound_together(stub_folder):
    """Unfinished bodies of 160 MiB in all, where 16 MiB may be held: whoever sends little notices nothing."""
    budget, part = 16 * 2**20, b"a" * 2**20
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{KEY}\r\nContent-Length: {8 * len(part)}\r\n\r\n"
    with (
        start_server(EngineConfig(model=str(stub_folder)), api_key=KEYS, max_body_bytes_in_flight=budget) as server,
        Bystander(server.url, KEYS[1]),
        contextlib.ExitStack() as stack,
    ):
        server.http.headers["Authorization"] = f"Bearer {KEYS[0]}"
        before = memory(server)
        senders = [stack.enter_context(connect(server.url)) for _ in range(20)]
        for sender in senders:
            sender.sendall(head.encode())
        for _ in range(7):
            for sender in senders:
                sender.sendall(part)
            assert memory(server) - before < budget + 24 * 2**20
        most_held = budget // (7 * len(part)) + 1
        eventually(lambda: sum(is_readable(sender) for sender in senders) >= len(senders) - most_held)
        for sender in filter(is_readable, senders):
            reply = sender.recv(65536)
            assert status(reply) == 503
            assert b"retry-after: 1\r\n" in reply.lower()
            assert b"--max-body-bytes-in-flight" in reply
        for sender in senders:
            sender.close()
        # All of it has been returned: a body that needs nearly all of it is read, and found to be no JSON.
        big = b"a" * (budget - 2**20)
        server.wait_for(lambda: server.http.post(f"{server.url}/v1/completions", content=big).status_code == 400)


def is_readable(connection) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def test_nothing_short_waits_for_what_is_long():
    """All text goes through one worker: while it encodes a long one, it must go on with those of others."""
    with serve(demo_model_path(), "--max-model-len", "2048", "--num-pages", "200") as server:
        text = {"prompt": "the mill " * 14_000}  # nearly as much as is taken
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            replies = [pool.submit(server.post, "/tokenize", text) for _ in range(8)]
            num_short = 0
            while not all(reply.done() for reply in replies):
                is_first = not any(reply.done() for reply in replies)
                assert server.post("/tokenize", {"prompt": "x"}).status_code == 200
                # One that waited its turn, whenever it came, would be answered when all of these have ended.
                num_short += not (any if is_first else all)(reply.done() for reply in replies)
        assert {reply.result().status_code for reply in replies} == {200}
        assert num_short > 1, "one may come before the long ones; others are answered before these have ended"


def test_what_cannot_fit_is_refused_before_it_is_looked_at(guarded):
    text, message = "the mill " * 1_500_000, {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {}}}
    many = [message] * 300_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": text, "truncate_prompt_tokens": 5}),
        ("/v1/chat/completions", {"messages": [message | {"content": text}]}),
        ("/v1/chat/completions", {"messages": many}),
        ("/tokenize", {"messages": [message], "tools": [tool]}),
        ("/v1/embeddings", {"input": text}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": many}),
        ("/v1/messages/count_tokens", {"model": "echo", "messages": many}),
        ("/v1/messages", {"model": "echo", "messages": many, "max_tokens": 1}),
        ("/v1/responses", {"input": many}),
        ("/detokenize", {"tokens": [1] * 3_000_000}),
        ("/v1/chat/completions", {"messages": [message], "chat_template_kwargs": {"x": ["y"] * 2_000_000}}),
        ("/tokenize", {"messages": [message], "chat_template_kwargs": {"x": ["y"] * 2_000_000}}),
    ):
        reply = guarded.post(path, body)
        assert reply.status_code in (400, 413), (path, reply.text[:200])
        assert len(reply.content) < 1000


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":['])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"])
def test_deep_json_is_refused(guarded, path, opening):
    for depth in (70, 900, 200_000):
        nested = opening * depth
        for body in (nested, f'{{"messages": {nested}', f'{{"prompt": {nested}', f'{{"tools": {nested}'):
            reply = guarded.http.post(guarded.url + path, content=body)
            assert reply.status_code in (400, 413), (path, depth, reply.text[:200])
    closed = "[" * 200 + "]" * 200
    for field in ("tools", "chat_template_kwargs", "messages"):
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": {closed}}}'
        reply = guarded.http.post(guarded.url + "/v1/chat/completions", content=body)
        assert reply.status_code == 400


LIMITS = {
    "n": ({"n": 128, "max_tokens": 1}, {"n": 129}),
    "prompt": ({"prompt": ["x"] * 256, "max_tokens": 1}, {"prompt": ["x"] * 257}),
    "stop": ({"stop": ["a"] * 4}, {"stop": ["a"] * 5}),
    "stop_token_ids": ({"stop_token_ids": [1] * 128}, {"stop_token_ids": [1] * 129}),
    "logprobs": ({"logprobs": 20}, {"logprobs": 21}),
    "bad_words": ({"bad_words": ["xy"] * 128}, {"bad_words": ["xy"] * 129}),
    "allowed_token_ids": ({"allowed_token_ids": [1] * 4096}, {"allowed_token_ids": [1] * 4097}),
    "logit_bias": (
        {"logit_bias": {str(i): 1 for i in range(512)}},
        {"logit_bias": {str(i).zfill(9): 1 for i in range(1025)}},
    ),
    "request_id": ({"request_id": "x" * 128}, {"request_id": "x" * 129}),
    "cache_salt": ({"cache_salt": "x" * 256}, {"cache_salt": "x" * 257}),
}


@pytest.mark.parametrize("field", LIMITS)
def test_counts_are_capped(guarded, field):
    within, beyond = LIMITS[field]
    body = {"prompt": "x", "max_tokens": 2}
    assert guarded.post("/v1/completions", body | within).status_code == 200
    reply = guarded.post("/v1/completions", body | beyond)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)


def test_a_stop_string_has_a_longest_length(guarded):
    for length, expected in ((1024, 200), (1025, 400)):
        body = {"prompt": "x", "max_tokens": 2, "stop": "s" * length}
        assert guarded.post("/v1/completions", body).status_code == expected


def test_no_client_can_make_the_metrics_grow(guarded):
    def names() -> set[str]:
        text = guarded.http.get(f"{guarded.url}/metrics").text
        return {line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}

    guarded.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    before = names()
    for i in range(50):
        guarded.http.get(f"{guarded.url}/nothing/{i}")
        guarded.http.request(f"VERB{i}", f"{guarded.url}/v1/models")
        guarded.post(
            "/v1/completions",
            {"prompt": "x", "max_tokens": 1, "request_id": f"r{i}", "cache_salt": f"s{i}", "user": f"u{i}"},
        )
        guarded.post("/v1/completions", {"prompt": "x", "model": f"m{i}"})
    assert names() == before


def test_numbers_with_many_digits_are_refused_at_once(guarded):
    digits = "9" * 2_000_000
    for body in (f'{{"prompt": "x", "seed": {digits}}}', f'{{"prompt": "x", "temperature": 0.{digits}}}',
                 f'{{"prompt": [{digits}]}}', f'{{"prompt": "x", "temperature": 1e{digits}}}'):  # fmt: skip
        # Read digit by digit each would take the square of their number: half a minute and more.
        reply = guarded.http.post(f"{guarded.url}/v1/completions", content=body, timeout=patience(20))
        assert reply.status_code in (200, 400), json.dumps(reply.text[:200])
