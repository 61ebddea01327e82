"""Seconds from the start of a process to its first token, of starts after the first one.

    python -m benchmarks.start [--model MODEL] [--quantization int8] [--gguf FILE] [--llama-server PROGRAM] [--rounds 5]

Ways: `tokenmill serve` with a request as soon as it takes one, `LLM(...)`, `tokenmill complete --local` (as stored, no
quantization), and llama.cpp's server where its program is found, on the GGUF file. They take turns. A round starts each
way with its files in the page cache, then, with `--cold`, after they were dropped from it: those of the model, the
packed weights and the Python packages, as far as no other process maps them. The first start of each way, which may
pack weights and compile, is not counted. One line for each way, then one line of JSON. Linux only.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import signal
import site
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT = "Once upon a time"
PATIENCE = 600.0
PAUSE = 0.002
OFFLINE = """
import json, sys
from tokenmill import LLM, SamplingParams
with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
    for delta in llm.stream(sys.argv[3], SamplingParams(max_tokens=1, temperature=0.0)):
        print(delta.token_ids, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds until the first token, and of processor time of all its processes until they had ended."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Way:
    """A way to the first token.

    Attributes:
        command: of the process. port: where it serves; None: it prints the token.
        variables: of its environment.
    """

    name: str
    command: tuple[str, ...]
    port: int | None
    variables: dict[str, str]


def main(arguments: Sequence[str] | None = None) -> None:
    """Start each way again and again, in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a folder, file or hub id; default: the demo model")
    parser.add_argument("--quantization", default="none", help="of the weights: none, int8, int4")
    parser.add_argument("--gguf", default="", help="the file that llama.cpp's server reads")
    parser.add_argument("--llama-server", default=shutil.which("llama-server") or "", help="llama.cpp's server")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="also start with files dropped from the page cache")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tm-start-") as cache:
        ways = list(_ways(args, cache))
        files = [Path(cache), *map(Path, filter(os.path.exists, (args.model, args.gguf)))]
        files += map(Path, site.getsitepackages())
        found = _measure(ways, args.rounds, (False, True) if args.cold else (False,), files)
    print(
        json.dumps({"model": args.model or "demo", "quantization": args.quantization, "threads": args.threads} | found)
    )


def _ways(args: argparse.Namespace, cache: str) -> Iterator[Way]:
    python, threads = sys.executable, str(args.threads)
    variables = {"TOKENMILL_WEIGHT_CACHE_DIR": cache}
    model = list(filter(None, [args.model]))
    port = _free_port()
    command = [python, "-m", "tokenmill", "serve", *model, "--port", str(port), "--num-threads", threads]
    yield Way("serve", (*command, "--quantization", args.quantization), port, variables)
    options = {"num_threads": args.threads, "quantization": args.quantization, "weight_cache_dir": cache}
    yield Way("LLM", (python, "-c", OFFLINE, args.model, json.dumps(options), PROMPT), None, {})
    if args.quantization == "none":
        # Without a value the flag would take the prompt for a model.
        local = [f"--local={args.model}"]
        command = [python, "-m", "tokenmill", "complete", *local, "--max-tokens", "1", "--temperature", "0", PROMPT]
        yield Way("complete", tuple(command), None, variables)
    if args.llama_server and args.gguf:
        port = _free_port()
        command = [args.llama_server, "--model", args.gguf, "--port", str(port), "--threads", threads]
        yield Way("llama.cpp", (*command, "--ctx-size", "2048"), port, {})


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _measure(ways: Sequence[Way], rounds: int, caches: Sequence[bool], files: Sequence[Path]) -> dict[str, Any]:
    """Return the medians by way and cache, of seconds until the token and of processor seconds."""
    starts: dict[tuple[str, str], list[Start]] = {}
    for way in ways:
        _start(way)
    for _ in range(rounds):
        for is_cold in caches:
            for way in ways:
                if is_cold:
                    _drop(files)
                starts.setdefault((way.name, "cold" if is_cold else "warm"), []).append(_start(way))
    found: dict[str, Any] = {}
    for (name, cache), each in starts.items():
        walls = [start.wall for start in each]
        middle, cpu = statistics.median(walls), statistics.median(start.cpu for start in each)
        print(f"{name:<10} {cache}  {middle:6.2f} s ({min(walls):.2f} to {max(walls):.2f}), {cpu:5.2f} s of processor")
        found.setdefault(name, {})[cache] = {"seconds": round(middle, 3), "cpu_seconds": round(cpu, 3)}
    return {"rounds": rounds, "first_token": found}


def _start(way: Way) -> Start:
    """Start a process, wait for its first token, and end it."""
    before = os.times()
    started = time.perf_counter()
    with _running(way) as process:
        wait: Callable[[], None] = (lambda: _printed(process)) if way.port is None else lambda: _served(process, way)
        wait()
        wall = time.perf_counter() - started
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Start(wall, cpu)


@contextmanager
def _running(way: Way) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | way.variables
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(way.command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, env=environment)
    try:
        yield process
        if way.port is not None:
            process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()


def _printed(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None, "a pipe"
    if not process.stdout.read1(1):  # type: ignore[attr-defined]
        raise SystemExit(f"no token: {' '.join(map(str, process.args))}")  # type: ignore[arg-type]


def _served(process: subprocess.Popen[bytes], way: Way) -> None:
    """Ask for a token until the server gives one: it refuses, or says 503, while it starts."""
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", way.port, timeout=PATIENCE)
        try:
            content = json.dumps(body)
            connection.request("POST", "/v1/completions", content, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status == 200 and reply.readline().startswith(b"data: {"):
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(PAUSE)
    raise SystemExit(f"{way.name} does not answer: {' '.join(way.command)}")


def _drop(places: Iterable[Path]) -> None:
    """Drop files from the page cache; what is dirty or mapped by a process stays."""
    os.sync()
    for place in places:
        for path in [place] if place.is_file() else filter(Path.is_file, place.rglob("*")):
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError:
                continue
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


if __name__ == "__main__":
    main()
