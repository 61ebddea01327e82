"""Measure the cost of the API side: CPU seconds per streamed token outside the engine, and the time to a first token.

    python benchmarks/frontend.py [--streams 200] [--tokens 100] [--step-ms 50] [--api-servers 1]

The real server and text worker serve the demo model's tokenizer over a stub engine (`frontend_stub.py`) that gives
every request a token each step. Clients run in this process, on plain sockets. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
TICKS = os.sysconf("SC_CLK_TCK")
READY = "ready"


def main() -> None:
    """Start the server, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200, help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream")
    parser.add_argument("--step-ms", type=float, default=50.0, help="a step of the stub engine")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of the cost; the least counts")
    parser.add_argument("--probes", type=int, default=40, help="requests whose first token is timed, at each load")
    parser.add_argument("--api-servers", type=int, default=1, help="processes that speak HTTP")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        sys.exit(_serve(arguments.serve, arguments.api_servers))
    with _server(arguments.step_ms / 1000, arguments.api_servers) as (port, pids):
        costs = [asyncio.run(_cost(port, pids, arguments)) for _ in range(arguments.repeats)]
        for cost in costs:
            print(
                f"{arguments.streams} streams: {cost.total:6.1f} us of CPU per token outside the engine "
                f"(HTTP {cost.http:.1f}, of which the busiest process {cost.busiest:.1f}, text {cost.text:.1f}), "
                f"{cost.events:.2f} events per token"
            )
        first_tokens = {}
        for num_open in (1, 50, 100, 200, 400):
            first_tokens[num_open] = asyncio.run(_first_tokens(port, num_open, arguments.probes))
            median, tail = first_tokens[num_open]
            print(f"{num_open:4d} open streams: first token after {median:6.1f} ms (median), {tail:6.1f} ms (p90)")
    result = {
        "streams": arguments.streams,
        "step_ms": arguments.step_ms,
        "cpu_us_per_token": round(min(cost.total for cost in costs), 1),
        "cpu_us_per_token_median": round(statistics.median(cost.total for cost in costs), 1),
        "api_servers": arguments.api_servers,
        "cpu_us_per_token_of_busiest": round(min(cost.busiest for cost in costs), 1),
        "events_per_token": round(statistics.median(cost.events for cost in costs), 2),
        "first_token_ms": {str(num_open): round(median, 1) for num_open, (median, _) in first_tokens.items()},
        "first_token_ms_p90": {str(num_open): round(tail, 1) for num_open, (_, tail) in first_tokens.items()},
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(result))


class Pids(NamedTuple):
    """The processes of a server that are not the engine."""

    http: list[int]
    text: list[int]


class Cost(NamedTuple):
    """Microseconds of CPU per token: of the processes that speak HTTP, of the busiest of them, and of those that make
    text. What the busiest takes is what limits how many tokens a second there can be.

    Deltas that come while a client's socket is not served are sent as one, so a machine under load sends fewer events
    per token.
    """

    http: float
    busiest: float
    text: float
    events: float

    @property
    def total(self) -> float:
        """Of all processes outside the engine."""
        return self.http + self.text


async def _cost(port: int, pids: Pids, arguments: argparse.Namespace) -> Cost:
    before = [_cpu_seconds([pid]) for pid in (*pids.http, *pids.text)]
    events = await asyncio.gather(*(_stream(port, arguments.tokens) for _ in range(arguments.streams)))
    num_tokens = arguments.streams * arguments.tokens
    after = [_cpu_seconds([pid]) for pid in (*pids.http, *pids.text)]
    each = [1e6 * (now - was) / num_tokens for now, was in zip(after, before, strict=True)]
    http = each[: len(pids.http)]
    return Cost(sum(http), max(http), sum(each) - sum(http), sum(count for count, _ in events) / num_tokens)


async def _first_tokens(port: int, num_open: int, num_probes: int) -> tuple[float, float]:
    """Milliseconds to the first event of a request while `num_open` others stream: median and 90th percentile."""
    others = [asyncio.ensure_future(_stream(port, 8000)) for _ in range(num_open)]
    await asyncio.sleep(1.0)
    seconds = [(await _stream(port, 2))[1] for _ in range(num_probes)]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0.3)
    return 1000 * statistics.median(seconds), 1000 * statistics.quantiles(seconds, n=10)[-1]


async def _stream(port: int, num_tokens: int) -> tuple[int, float]:
    """Stream one chat; returns how many events came, and the seconds to the first."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": num_tokens, "stream": True}
    )
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write((head + body).encode())
        await reader.readuntil(b"data: ")
        first = time.perf_counter() - began
        count, last = 1, b""
        while part := await reader.read(1 << 16):
            count += part.count(b"data: ")
            last = (last + part)[-32:]
        assert b"[DONE]" in last, "a stream ended early"
        return count, first
    finally:
        writer.close()


@contextlib.contextmanager
def _server(step_seconds: float, api_servers: int) -> Iterator[tuple[int, Pids]]:
    """Port of a running server, and its processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"PYTHONPATH": str(HERE), "TOKENMILL_STUB_STEP_SECONDS": str(step_seconds)}
    command = [sys.executable, __file__, "--serve", str(port), "--api-servers", str(api_servers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | variables)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == READY, "the server did not start"
        http = _children(process.pid, "--serve") or [process.pid]
        text = _children(min(http), "tokenmill.serving.frontend.worker")
        if api_servers > 1:
            time.sleep(1.0)  # the others begin when the first has
        yield port, Pids(http, text)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)


def _serve(port: int, api_servers: int) -> int:
    from tokenmill.config.configs import EngineConfig, ServerConfig
    from tokenmill.core.engine_messages import EngineReady
    from tokenmill.serving.server.process.launch import run
    from tokenmill.serving.server.process.screen import StandardError

    class Ready(StandardError):
        def on_ready(self, ready: EngineReady) -> None:
            print(READY, flush=True)

    # Without restarts a process that serves alone is this one.
    server = ServerConfig(port=port, disable_log_stats=True, max_restarts=0, api_server_count=api_servers)
    return run(EngineConfig(), server, Ready, engine_module="frontend_stub")


def _children(parent: int, what: str) -> list[int]:
    """Processes of this parent whose command line says this."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            is_child = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]) == parent
            if is_child and what in (folder / "cmdline").read_text():
                found.append(int(folder.name))
    return found


def _cpu_seconds(pids: list[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / TICKS


if __name__ == "__main__":
    main()
