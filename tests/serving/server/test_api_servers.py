"""Several API processes on one socket: clients cannot tell which of them they have."""

import contextlib
import errno
import json
import os
import random
import re
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.eventually import join, patience
from tests.serving.server.chaos import check, start
from tests.serving.server.running_server import JSON, is_alive, start_server
from tests.serving.server.test_lifecycle import open_stream
from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.core.errors import InvalidConfig


@contextlib.contextmanager
def two_processes(model, **flags):
    with start_server(EngineConfig(model=str(model)), api_server_count=2, **flags) as server:
        server.wait_for(lambda: len(sibling_socket(server)) == 1)
        server.wait_for(lambda: answers(server, sibling(server)))
        yield server


@pytest.fixture
def server(slow_model):
    """One that a test may end."""
    with two_processes(slow_model, shutdown_timeout=2.0) as server:
        yield server


@pytest.fixture(scope="module")
def shared_server(slow_model):
    """One for all tests that leave it as it was."""
    with two_processes(slow_model, shutdown_timeout=2.0) as server:
        yield server


def sibling_socket(server) -> list:
    """The inbox of the sibling, once it is there."""
    return [path for folder in server.private.iterdir() for path in folder.glob("api-1.ipc")]


def sibling(server) -> int:
    return max(server.api_pids)


@contextlib.contextmanager
def only(server, pid: int):
    """Inside, no other API process takes a connection."""
    others = [one for one in server.api_pids if one != pid]
    for other in others:
        os.kill(other, signal.SIGSTOP)
    try:
        yield
    finally:
        for other in others:
            os.kill(other, signal.SIGCONT)


def answers(server, pid: int) -> bool:
    """True once this API process serves: a sibling hears that it may from the first one, after that one serves.

    What a test stops before is never said.
    """
    with only(server, pid), contextlib.suppress(httpx.TimeoutException):
        return httpx.post(f"{server.url}/tokenize", json={"prompt": "a"}, timeout=patience(2)).status_code == 200
    return False


def stream_at(server, pid: int, lines: list[str], **fields):
    with only(server, pid):
        return open_stream(server, lines, **fields)


def text_of(lines: list[str]) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def test_operators_see_what_every_process_has(shared_server):
    server = shared_server
    streams: dict[int, list[str]] = {}
    threads = []
    counts = {"time_to_first_token_seconds_count": {}, "request_success_total": {"finished_reason": "abort"}}
    before = {name: server.metric(name, **labels) for name, labels in counts.items()}
    for pid in server.api_pids:
        threads.append(stream_at(server, pid, streams.setdefault(pid, []), max_tokens=100_000))
    ids = {pid: json.loads(lines[0].removeprefix("data: "))["id"] for pid, lines in streams.items()}
    server.wait_for(lambda: server.http.get(f"{server.url}/load").json()["server_load"] == 2)
    for name in list(ids.values()) * 4:  # each time a new connection, which any of them may take
        state = httpx.get(f"{server.url}/v1/requests/{name}", timeout=patience()).json()
        assert state["requests"][0]["num_output_tokens"] > 0, state
    body = {"request_ids": [ids[sibling(server)], "nobody"]}
    assert server.post("/abort_requests", body).json() == {"num_aborted": 1, "unknown": ["nobody"]}
    server.wait_for(lambda: "[DONE]" in streams[sibling(server)][-1])
    assert '"finish_reason":"abort"' in "".join(streams[sibling(server)])
    assert server.post("/abort_requests", {"abort_all": True}).json()["num_aborted"] == 1
    for thread in threads:
        join(thread)
    for name, labels in counts.items():
        server.wait_for(lambda name=name, labels=labels: server.metric(name, **labels) == before[name] + 2)
    assert server.metric("inter_token_latency_seconds_count") > 0
    server.wait_until_unused()


def test_what_one_process_keeps_all_answer(shared_server):
    server = shared_server
    reply = server.post("/v1/responses", {"input": "Hello", "max_output_tokens": 3}).json()
    for _ in range(6):  # each time a new connection, which any of them may take
        assert httpx.get(f"{server.url}/v1/responses/{reply['id']}", timeout=patience()).json() == reply
    body = {"input": "Hello", "stream": True, "max_output_tokens": 5}
    with httpx.stream("POST", f"{server.url}/v1/responses", json=body, timeout=patience()) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        events = [line for line in got.iter_lines() if line.startswith("event:")]
    assert (events[0], events[-1]) == ("event: response.created", "event: response.incomplete")
    refused = httpx.post(f"{server.url}/abort_requests", content=b"{", headers=JSON, timeout=patience())
    assert refused.status_code == 400
    assert httpx.head(f"{server.url}/health", timeout=patience()).status_code == 200
    assert httpx.get(f"{server.url}/nothing", timeout=patience()).status_code == 404


def established(server) -> list[int]:
    """Count the connections of each process with clients."""
    port = f":{int(server.url.rsplit(':', 1)[1]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[1].endswith(port) and row[3] == "01"}
    return [len({inode for inode in sockets_of(pid) if inode in inodes}) for pid in server.api_pids]


def sockets_of(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += re.findall(r"^socket:\[(\d+)\]$", os.readlink(link))
    return found


def test_connections_that_come_at_once_are_spread(server):
    port = int(server.url.rsplit(":", 1)[1])

    def spread(count: int) -> list[int]:
        """Count the clients that each process takes, of some that all connect before any is accepted."""
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                assert client.connect_ex(("127.0.0.1", port)) in (0, errno.EINPROGRESS)
            server.wait_for(lambda: sum(established(server)) == count)
            found = established(server)
        server.wait_for(lambda: sum(established(server)) == 0)
        return found

    server.wait_for(lambda: min(spread(6)) > 0)  # the sibling accepts, too
    for count in (34, 7, 100):
        # A process that gets no processor for a second is not waited for: not each of five can be even, and on a busy
        # machine not each middle of five.
        most_even = max(0.6 * count, count / 2 + 1.5)
        server.wait_for(lambda count=count, even=most_even: sorted(max(spread(count)) for _ in range(5))[2] <= even)


def test_a_sibling_that_dies_comes_back_and_nobody_else_notices(server):
    dead = sibling(server)
    kept, lost = [], []
    threads = [stream_at(server, server.api_pid, kept, max_tokens=120), stream_at(server, dead, lost, max_tokens=120)]
    os.kill(dead, signal.SIGKILL)
    for thread in threads:
        join(thread)
    assert "[DONE]" in kept[-1]
    assert "[DONE]" not in lost[-1]
    server.wait_for(lambda: len(server.api_pids) == 2)
    assert "API process 1 was killed by SIGKILL; it is started again" in server.output()
    server.wait_until_unused()
    lines: list[str] = []
    again = sibling(server)
    server.wait_for(lambda: server.metric("restarts_total", part="api-1") == 1)
    server.wait_for(lambda: httpx.get(f"{server.url}/health", timeout=patience()).status_code == 200)
    server.wait_for(lambda: answers(server, again))
    join(stream_at(server, again, lines, max_tokens=10))
    assert "[DONE]" in lines[-1]


def test_a_sibling_that_hangs_is_killed(slow_model):
    engine = EngineConfig(model=str(slow_model))
    with start_server(engine, api_server_count=2, engine_timeout=1.0) as server:
        server.wait_for(lambda: len(server.api_pids) == 2 and len(sibling_socket(server)) == 1)
        server.wait_for(lambda: answers(server, sibling(server)))  # before, it is waited for as one that starts
        hanging = sibling(server)
        os.kill(hanging, signal.SIGSTOP)
        server.wait_for(lambda: not is_alive(hanging))
        server.wait_for(lambda: "API process 1 was killed by SIGKILL; it is started again" in server.output())


def test_the_end_of_the_first_is_the_end_of_all(server):
    pids = [*server.api_pids, *server.children().values()]
    lines: list[str] = []
    thread = stream_at(server, sibling(server), lines)
    os.kill(server.api_pid, signal.SIGKILL)
    server.wait_for(lambda: not any(is_alive(pid) for pid in pids))
    join(thread)
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 3}).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_for_end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_lets_the_streams_of_all_end(server, number):
    short, long = [], []
    threads = [
        stream_at(server, sibling(server), short, max_tokens=20),
        stream_at(server, sibling(server), long, max_tokens=100_000),
    ]
    server.process.send_signal(number)
    assert server.wait_for_end() == 0
    for thread in threads:
        join(thread)
    assert "[DONE]" in short[-1]
    assert "the server is stopping" in long[-2]


def test_an_engine_that_dies_too_often_ends_the_streams_of_all_with_an_error(slow_model):
    with two_processes(slow_model, max_restarts=0) as server:
        lines: list[str] = []
        thread = stream_at(server, sibling(server), lines)
        os.kill(next(pid for name, pid in server.children().items() if "stub_engine" in name), signal.SIGKILL)
        assert server.wait_for_end() == 1
        join(thread)
        assert '"type":"engine_unavailable"' in lines[-2]


def test_streams_of_all_outlive_whatever_happens_to_a_part(tiny_checkpoint):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with start(tiny_checkpoint, 1, api_servers=2) as server:
        check(server, 12, ["an engine is killed", "a text worker is killed"], random.Random(seed))


def test_text_workers_must_be_processes():
    with pytest.raises(InvalidConfig, match="--tokenizer-workers must be 1 or more beside --api-server-count"):
        ServerConfig(api_server_count=2, tokenizer_workers=0).resolve()
