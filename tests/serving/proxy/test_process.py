"""`tokenmill proxy` as a process: how it ends, and what clients see of servers that are killed behind it."""

import contextlib
import json
import os
import signal
import threading

import httpx
import pytest

from tests.eventually import join, patience
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_proxy import start_proxy
from tests.serving.server.running_server import RunningServer, start_server
from tokenmill.config.configs import EngineConfig

LONG = 100_000
BODY = {"prompt": "hello there", "max_tokens": 40}
MESSAGES = {"model": "slow", "messages": [{"role": "user", "content": "hello"}], "max_tokens": LONG}


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """Starts servers of 20 tokens a second, which end when an engine does; a long answer does not end by itself."""
    stub = {"step_seconds": 0.05, "max_model_len": 1_000_000}
    folder = write_folder(tmp_path_factory.mktemp("models") / "slow", byte_level_tokenizer(), config={"stub": stub})
    return lambda: start_server(EngineConfig(model=str(folder)), max_restarts=0)


@pytest.fixture(scope="module")
def server(slow):
    """One that stays while proxies in front of it are stopped."""
    with slow() as running:
        yield running


class Stream:
    """A streamed answer, read in a thread."""

    def __init__(self, url: str, max_tokens: int = LONG, path: str = "/v1/completions"):
        self.lines: list[str] = []
        self.begun = threading.Event()
        body = MESSAGES if path == "/v1/messages" else BODY | {"max_tokens": max_tokens}
        self._asked = url + path, body | {"stream": True}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        url, body = self._asked
        how = {"json": body, "timeout": patience()}
        with contextlib.suppress(httpx.RemoteProtocolError), httpx.stream("POST", url, **how) as reply:
            for line in filter(None, reply.iter_lines()):
                self.lines.append(line)
                self.begun.set()
        self.begun.set()

    def wait(self) -> list[str]:
        join(self._thread)
        assert not self._thread.is_alive()
        return self.lines


def kill(server: RunningServer) -> None:
    """All of it at once."""
    for pid in (server.process.pid, *server.api_pids, *server.children().values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_short_streams_end_and_tells_long_ones(server, number):
    with start_proxy([server.url], [server.url], shutdown_timeout=10.0) as proxy:
        short, long = Stream(proxy.url, max_tokens=20), Stream(proxy.url, max_tokens=LONG)
        assert short.begun.wait(patience()) and long.begun.wait(patience())
        proxy.process.send_signal(number)
        assert proxy.process.wait(patience()) == 0
        assert short.wait()[-1] == long.wait()[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in "".join(short.lines)
        assert json.loads(long.lines[-2].removeprefix("data: "))["error"]["type"] == "server_stopping"
        assert "Traceback" not in proxy.output()
        server.wait_until_unused()


def test_whoever_waits_for_a_first_byte_is_told_too(server):
    with start_proxy([server.url], [server.url], shutdown_timeout=0.5) as proxy:
        replies: list[httpx.Response] = []
        body = BODY | {"max_tokens": LONG}
        waiting = threading.Thread(
            target=lambda: replies.append(httpx.post(f"{proxy.url}/v1/completions", json=body, timeout=patience()))
        )
        waiting.start()
        server.wait_for(lambda: server.metric("num_requests_running") == 1)
        proxy.process.send_signal(signal.SIGTERM)
        assert proxy.process.wait(patience()) == 0
        join(waiting)
        assert (replies[0].status_code, replies[0].json()["error"]["type"]) == (503, "server_stopping")
        server.wait_until_unused()


def test_the_second_ctrl_c_waits_for_nobody(server):
    with start_proxy([server.url], [server.url], shutdown_timeout=3600.0) as proxy:
        stream = Stream(proxy.url, max_tokens=LONG)
        assert stream.begun.wait(patience())
        proxy.process.send_signal(signal.SIGINT)
        proxy.wait_for(lambda: not is_open(proxy.url))
        proxy.process.send_signal(signal.SIGINT)
        assert proxy.process.wait(patience()) == 0
        assert "server_stopping" in stream.wait()[-2]
        server.wait_until_unused()


def is_open(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code > 0
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages"])
def test_a_server_that_is_killed_ends_its_streams_with_an_error(slow, path):
    with slow() as one, slow() as two, start_proxy([one.url], [one.url, two.url]) as proxy:
        stream = Stream(proxy.url, path=path)
        assert stream.begun.wait(patience())
        proxy.wait_for(lambda: one.metric("num_requests_running") + two.metric("num_requests_running") == 1)
        (first,) = [server for server in (one, two) if server.metric("num_requests_running")]
        kill(first)
        lines = stream.wait()
        error = next(line for line in reversed(lines) if '"error"' in line)
        assert json.loads(error.removeprefix("data: "))["error"]["message"].startswith("the server that answered this")
        assert all(line.startswith(("data: ", "event: ")) for line in lines)
        for _ in range(4):  # the other one answers from now on
            assert proxy.post("/v1/completions", BODY | {"max_tokens": 2}).status_code == 200


def test_a_server_that_is_killed_before_its_first_byte_is_replaced(slow):
    with slow() as one, slow() as two, start_proxy([one.url], [one.url, two.url]) as proxy:
        replies: list[httpx.Response] = []
        body = BODY | {"max_tokens": 150}  # seconds, of which the kill needs one
        waiting = threading.Thread(target=lambda: replies.append(proxy.post("/v1/completions", body)))
        waiting.start()
        proxy.wait_for(lambda: one.metric("num_requests_running") + two.metric("num_requests_running") == 1)
        kill(one if one.metric("num_requests_running") else two)
        join(waiting)
        assert replies[0].status_code == 200, replies[0].text
        assert replies[0].json()["choices"][0]["finish_reason"] == "length"
