"""THREATS rows E and J: whoever connects and then says nothing, half a request or nothing more is not waited for
for ever, and keeps nobody else out.
"""

import contextlib
import http.client
import json
import resource
import socket
import time
from pathlib import Path

import httpx
import pytest

from tests.eventually import eventually, patience
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_proxy import start_proxy
from tests.serving.server.running_server import start_server
from tests.threats.bystander import Bystander
from tests.threats.conftest import KEYS
from tests.threats.raw_http import ask, connect, read_all, status
from tokenmill.config.configs import EngineConfig

KEY = f"Authorization: Bearer {KEYS[0]}"
POST = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{KEY}\r\n"
LIMITS = {"head_timeout": 1.0, "body_timeout": 2.0, "keep_alive_timeout": 3.0}
# Long enough for any machine, and far less than for ever.
PATIENCE = patience(30.0)


@pytest.fixture(scope="module", params=["server", "proxy"])
def server(request, stub_folder):
    """A server that waits for seconds where others wait for minutes, or a proxy that does."""
    limits = LIMITS if request.param == "server" else {}
    with start_server(EngineConfig(model=str(stub_folder)), api_key=KEYS, **limits) as running:
        if request.param == "server":
            yield running
            return
        with start_proxy([running.url], [running.url], api_key=KEYS, **LIMITS) as proxy:
            yield proxy


@pytest.fixture(autouse=True)
def beside(request):
    """Somebody who must not notice any of it."""
    if "server" not in request.fixturenames:
        yield
        return
    with Bystander(request.getfixturevalue("server").url, KEYS[1]):
        yield


def dribble(connection, part: bytes) -> bytes:
    """Send a part every tenth of a second until the server closes; returns what it said."""
    deadline = time.monotonic() + PATIENCE
    connection.settimeout(0.1)
    received = b""
    while time.monotonic() < deadline:
        try:
            connection.sendall(part)
            part_received = connection.recv(65536)
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            return received
        if not part_received:
            return received
        received += part_received
    raise AssertionError(f"still open after {PATIENCE} s")


def test_a_silent_connection_is_closed(server):
    with connect(server.url, PATIENCE) as connection:
        assert read_all(connection) == b""


@pytest.mark.parametrize("head", [b"G", b"GET /health HTTP/1.1\r\n", POST.encode()])
def test_half_a_head_is_answered_408(server, head):
    with connect(server.url, PATIENCE) as connection:
        connection.sendall(head)
        reply = read_all(connection)
        assert status(reply) == 408
        assert b"head did not come within 1 s" in reply


def test_a_head_that_comes_byte_by_byte_has_no_more_time(server):
    with connect(server.url, PATIENCE) as connection:
        connection.sendall(POST.encode() + b"X-Long: ")
        assert status(dribble(connection, b"a")) == 408


@pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_half_a_body_is_answered_408(server, framing):
    with connect(server.url, PATIENCE) as connection:
        connection.sendall(f"{POST}{framing}\r\n\r\n".encode() + b"1\r\n{")
        reply = read_all(connection)
        assert status(reply) == 408
        assert b"body did not come within 2 s" in reply


def test_a_body_that_drips_has_its_time_in_all(server):
    for framing, part in (("Content-Length: 100000", b" "), ("Transfer-Encoding: chunked", b"1\r\n \r\n")):
        with connect(server.url, PATIENCE) as connection:
            connection.sendall(f"{POST}{framing}\r\n\r\n".encode())
            reply = dribble(connection, part)
            assert status(reply) == 408, framing
            assert b"body did not come within 2 s" in reply


def test_a_large_body_that_keeps_coming_is_waited_for(server):
    """Of 120 KiB, at more than is needed: it takes longer than the time of a small one."""
    body = b" " * 120_000 + json.dumps({"prompt": "hello there", "max_tokens": 3}).encode()
    with connect(server.url, PATIENCE) as connection:
        connection.sendall(f"{POST}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        began = time.monotonic()
        for start in range(0, len(body), 4000):
            connection.sendall(body[start : start + 4000])
            time.sleep(0.1)
        assert time.monotonic() - began > LIMITS["body_timeout"]
        assert status(read_all(connection)) == 200


def test_a_refused_body_gets_no_more_time_however_it_comes(server):
    with connect(server.url, PATIENCE) as connection:
        connection.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        assert status(dribble(connection, b"a")) == 401


def test_an_idle_connection_is_closed(server):
    for request in (
        f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{KEY}\r\n\r\n",
        "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n1",  # 401, perhaps before the body
    ):
        with connect(server.url, PATIENCE) as connection:
            connection.sendall(request.encode())
            assert status(read_all(connection)) in (200, 401)


def test_a_kept_connection_serves_again_within_its_time(server):
    eventually(lambda: serves_five_times(server.url))


def serves_five_times(url: str) -> bool:
    """Ask over one connection for longer than it may be idle; False if a pause was as long, on a busy machine.

    Raises:
        OSError, http.client.HTTPException: the connection was closed before its time.
    """
    headers = {"Authorization": f"Bearer {KEYS[0]}", "Content-Type": "application/json"}
    kept, asked = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE), time.monotonic()
    with contextlib.closing(kept):
        for _ in range(5):
            before, asked = asked, time.monotonic()
            try:
                kept.request("POST", "/v1/completions", '{"prompt": "x", "max_tokens": 1}', headers)
                reply = kept.getresponse()
            except (OSError, http.client.HTTPException):
                if time.monotonic() - before < LIMITS["keep_alive_timeout"]:
                    raise
                return False
            assert (reply.status, bool(reply.read())) == (200, True)
            time.sleep(0.8)  # less than it may be idle, and all together longer
    return True


@pytest.fixture(scope="module", params=["server", "proxy"])
def slow_server(request, tmp_path_factory):
    """The same at 20 tokens a second; an answer has an end only where it may have no more tokens."""
    stub = {"step_seconds": 0.05, "max_model_len": 1_000_000}
    folder = write_folder(tmp_path_factory.mktemp("models") / "slow", byte_level_tokenizer(), config={"stub": stub})
    with start_server(EngineConfig(model=str(folder)), **LIMITS) as running:
        if request.param == "server":
            yield running
            return
        with start_proxy([running.url], [running.url], **LIMITS) as proxy:
            yield proxy


@pytest.mark.parametrize("stream", [True, False])
def test_a_long_answer_is_not_cut(slow_server, stream):
    body = {"prompt": "hello", "max_tokens": 80, "stream": stream}
    began = time.monotonic()
    reply = slow_server.post("/v1/completions", body)
    assert time.monotonic() - began > 3.0
    assert '"finish_reason":"length"' in reply.text


def test_a_client_that_reads_slowly_gets_all(slow_server):
    body = json.dumps({"prompt": "hello", "max_tokens": 60, "n": 64, "stream": True, "logprobs": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    with connect(slow_server.url, PATIENCE) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        time.sleep(6.0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        reply = read_all(connection)
    assert reply.count(b'"finish_reason":"length"') == 64
    assert reply.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def half_closed(url: str, *requests: bytes) -> bytes:
    """Return the reply to a client that has sent all it will send, and says so."""
    with connect(url, PATIENCE) as connection:
        connection.sendall(b"".join(requests))
        connection.shutdown(socket.SHUT_WR)
        return read_all(connection)


def completion(version: str = "1.1", **fields) -> bytes:
    body = json.dumps({"prompt": "hello"} | fields).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_client_that_closes_its_side_is_answered(slow_server):
    quick = completion(max_tokens=4)
    for version in ("1.0", "1.1"):
        reply = half_closed(slow_server.url, completion(version, max_tokens=4))
        assert status(reply) == 200
        assert b'"finish_reason":"length"' in reply
    assert half_closed(slow_server.url, completion(max_tokens=60, stream=True)).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
    assert half_closed(slow_server.url, quick, quick, quick).count(b'"finish_reason":"length"') == 3
    assert half_closed(slow_server.url, quick, b"GET /heal").count(b"HTTP/1.1 200") == 1
    assert status(half_closed(slow_server.url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")) == 200
    assert half_closed(slow_server.url, quick[:-5]) == b"", "half a request"


def test_one_that_waits_long_may_be_told_to_go_on_first(slow_server):
    reply = half_closed(slow_server.url, completion(max_tokens=80))
    interim, rest = reply[:25], reply[25:]
    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert status(rest) == 200
    assert b'"finish_reason":"length"' in rest
    old = half_closed(slow_server.url, completion("1.0", max_tokens=80))
    assert status(old) == 200, "a client of 1.0 knows no interim replies"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("first", ["close", "shutdown"])
def test_one_that_leaves_is_no_such_client(slow_server, stream, first):
    before = slow_server.metric("request_success_total", finished_reason="abort")
    with connect(slow_server.url, PATIENCE) as connection:
        connection.sendall(completion(max_tokens=100_000, stream=stream))
        slow_server.wait_for(lambda: slow_server.metric("num_requests_running") == 1)
        if first == "shutdown":
            connection.shutdown(socket.SHUT_WR)
    slow_server.wait_until_unused()
    # The engine may say that it is gone before the API process has counted it.
    slow_server.wait_for(lambda: slow_server.metric("request_success_total", finished_reason="abort") > before)


def open_many(server, stack, first: bytes) -> list[socket.socket]:
    """300 connections that begin so and say no more; those that the server has closed meanwhile are among them."""
    found = []
    for _ in range(300):
        connection = stack.enter_context(connect(server.url, PATIENCE))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(first)
        found.append(connection)
    return found


def is_well(url: str) -> bool:
    return httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200


@pytest.fixture(scope="module")
def small_server(stub_folder):
    """A server with few descriptors, and fewer before it asks for more."""
    with start_server(EngineConfig(model=str(stub_folder)), api_key=KEYS, max_files=(200, 256)) as running:
        yield running


def test_the_soft_limit_of_descriptors_is_raised_to_the_hard_one(small_server):
    for pid in (small_server.api_pid, *small_server.children().values()):
        assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (256, 256)


@pytest.mark.parametrize("first", [b"", b"GET /v1/mo"])
def test_silent_connections_keep_nobody_out(small_server, first):
    with contextlib.ExitStack() as stack, Bystander(small_server.url, KEYS[1]):
        many = open_many(small_server, stack, first)
        for _ in range(20):
            assert is_well(small_server.url)
            body = b'{"prompt": "x", "max_tokens": 1}'
            reply = ask(small_server.url, "POST", "/v1/completions", KEY, "Content-Type: application/json", body=body)
            assert status(reply) == 200
        assert len(many) == 300
    # Once a minute at most.
    assert 1 <= small_server.output().count("connections are open; one that sent nothing was closed for another") <= 3
    assert len(list(Path(f"/proc/{small_server.api_pid}/fd").iterdir())) < 256


def test_unfinished_requests_leave_a_place_to_watch_the_server_from(stub_folder):
    with start_server(EngineConfig(model=str(stub_folder)), api_key=KEYS, max_files=(256, 256)) as running:
        with contextlib.ExitStack() as stack:
            open_many(running, stack, f"{POST}Content-Length: 1000\r\n\r\n{{".encode())
            for _ in range(20):
                assert is_well(running.url)
                reply = ask(running.url, "GET", "/v1/models", KEY)
                assert status(reply) == 503
                assert b"retry-after: 1\r\n" in reply.lower()
            # Which limit is met first depends on how much of the connections the server has read by then.
            refusals = ("connections have requests, which is the most", "one that sent nothing was closed for another")
            assert sum(running.output().count(why) for why in refusals) == 1
        running.wait_for(lambda: status(ask(running.url, "GET", "/v1/models", KEY)) == 200)
