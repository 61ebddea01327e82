"""A log that takes nothing more: a part that dies is started again all the same, and clients hear nothing of it."""

import contextlib
import os
import pty
import random
import signal
import socket
import sys

import pytest

from tests.eventually import join
from tests.serving.server.chaos import check, ended, full, start
from tests.serving.server.running_server import RunningServer, start_server
from tests.serving.server.test_lifecycle import open_stream
from tokenmill.config.configs import EngineConfig


@contextlib.contextmanager
def unread():
    """A full pipe whose reader lives and does not read."""
    reader, writer = os.pipe()
    with os.fdopen(reader), os.fdopen(writer, "w") as output:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"\n")
        os.set_blocking(writer, True)
        yield output


@contextlib.contextmanager
def unread_socket():
    """As service managers have it."""
    reader, writer = socket.socketpair()
    with reader, writer, os.fdopen(os.dup(writer.fileno()), "w") as output:
        with contextlib.suppress(BlockingIOError):
            while True:
                writer.send(b"\n", socket.MSG_DONTWAIT)
        yield output


@pytest.mark.parametrize(("make", "count"), [(ended, 1), (unread, 2), (unread_socket, 1), (full, 2)])
def test_parts_and_api_processes_come_back_without_a_log(slow_model, make, count):
    engine = EngineConfig(model=str(slow_model))
    with make() as output, start_server(engine, output=output, api_server_count=count, max_restarts=9) as server:
        for victim in ("stub_engine", "frontend.worker"):
            streams: list[list[str]] = [[] for _ in range(4)]
            threads = [open_stream(server, lines, max_tokens=60) for lines in streams]
            kill_one(server, victim)
            for thread, lines in zip(threads, streams, strict=True):
                join(thread)
                assert lines[-1] == "data: [DONE]"
                assert '"finish_reason":"length"' in lines[-2]
            server.wait_for(server.is_well)
        server.wait_for(lambda: server.metric("log_lines_lost_total", part="api") >= 2)
        api = server.api_pids
        os.kill(api[0], signal.SIGKILL)
        server.wait_for(lambda: len(server.api_pids) == count and not {*api} & {*server.api_pids})
        server.wait_for(server.is_well)
        assert open_and_read(server)[-1] == "data: [DONE]"
        server.wait_for(lambda: server.metric("log_lines_lost_total", part="api") >= 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for_end() == 0


@contextlib.contextmanager
def unread_terminal():
    """A terminal that somebody has stopped: the start-up screen moves there."""
    reader, writer = pty.openpty()
    with os.fdopen(reader), os.fdopen(writer, "w") as output:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, b"\n" * 100)
        os.set_blocking(writer, True)
        yield output


@pytest.mark.parametrize(
    ("make", "closed", "is_counted"),
    [(ended, "", True), (unread_terminal, "", True), (full, ">&- 2>&-", False), (full, "<&- >&- 2>&-", False)],
)
def test_the_command_serves_and_recovers_without_a_log(tiny_checkpoint, make, closed, is_counted):
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-m", "tokenmill", "serve", str(tiny_checkpoint)]
    command += ["--num-pages", "64"]
    with make() as output, start_server(EngineConfig(), command=command, output=output) as server:
        lines: list[str] = []
        thread = open_stream(server, lines, max_tokens=400, ignore_eos=True)
        kill_one(server, "engine_process")
        join(thread)
        assert '"finish_reason":"length"' in lines[-2]
        server.wait_for(server.is_well)
        server.wait_for(lambda: (server.metric("log_lines_lost_total", part="api") > 0) == is_counted)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for_end() == 0


def kill_one(server: RunningServer, name: str) -> None:
    os.kill(next(pid for called, pid in server.children().items() if name in called), signal.SIGKILL)


def open_and_read(server: RunningServer) -> list[str]:
    lines: list[str] = []
    join(open_stream(server, lines, max_tokens=5))
    return lines


@pytest.mark.parametrize("log", ["closed", "full"])
def test_streams_outlive_deaths_without_a_log_or_a_disk(tiny_checkpoint, log):
    """The long form is `make chaos`."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with start(tiny_checkpoint, 1, log=log) as server:
        check(server, 12, ["a text worker is killed", "an engine is killed"], random.Random(seed))
        server.wait_for(lambda: server.metric("log_lines_lost_total", part="api") > 0)
