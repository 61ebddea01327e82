"""An idle server: how often it wakes its machine, what of a core it takes, and the memory of its processes.

    python benchmarks/idle.py [--model MODEL] [--seconds 30] [flags of `tokenmill serve`]

The server answers one request and is left alone until its parts rest. A wake-up is a voluntary switch of a thread, as
Linux counts them in /proc: each is a wait that ended. Memory is the proportional set size (PSS) of each process: what
several share counts in parts. KV memory that was touched and weights that are mapped stand apart: mappings side by
side of at least 256 MiB without a file and with advice on huge pages, and files of weights. One line a process, then
one line of JSON. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

# Parts rest after ten seconds without work; looks in vain end before.
SETTLE_SECONDS = 20.0
MIB = 2**20
LEAST_KV = 256 * MIB
WEIGHTS = (".weights", ".safetensors", ".gguf")


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of a process since it began: waits of its threads that ended, and seconds of processor time."""

    wake_ups: int
    cpu: float


@dataclass(frozen=True, slots=True)
class Mapping:
    """Memory of a process: addresses, the bytes of its share, its file if any, and whether huge pages have advice."""

    begin: int
    end: int
    size: int
    path: str
    has_advice: bool


def main(arguments: Sequence[str] | None = None) -> None:
    """Start a server, let it rest, and print what it uses meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a folder, file or hub id; default: the demo model")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to count")
    args, flags = parser.parse_known_args(arguments)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tokenmill", "serve", *filter(None, [args.model]), "--port", str(port), *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _answer_once(f"http://127.0.0.1:{port}", server)
            time.sleep(SETTLE_SECONDS)
            _measure(server.pid, args.seconds, args.model or "demo")
        finally:
            server.terminate()


def _answer_once(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the server is there, and ask it for a few tokens."""
    while server.poll() is None:
        try:
            httpx.get(f"{url}/health").raise_for_status()
            break
        except httpx.HTTPError:
            time.sleep(0.1)
    body = {"prompt": "Once upon a time", "max_tokens": 4}
    httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()


def _measure(root: int, seconds: float, model: str) -> None:
    processes = _tree(root)
    before = {process: _usage(process) for process in processes}
    time.sleep(seconds)
    wake_ups = cpu = own = model_memory = 0.0
    for process in processes:
        now, (rest, kv_and_weights) = _usage(process), _memory(process)
        woke = (now.wake_ups - before[process].wake_ups) / seconds
        took = 100 * (now.cpu - before[process].cpu) / seconds
        print(
            f"{woke:5.1f} wake-ups/s {took:5.2f}% of a core {rest / MIB:6.1f} MiB "
            f"{kv_and_weights / MIB:6.1f} MiB of KV and weights  {_name(process)}"
        )
        wake_ups, cpu = wake_ups + woke, cpu + took
        own, model_memory = own + rest, model_memory + kv_and_weights
    result = {
        "model": model,
        "wake_ups_per_second": round(wake_ups, 1),
        "percent_of_a_core": round(cpu, 2),
        "own_mib": round(own / MIB, 1),
        "kv_and_weights_mib": round(model_memory / MIB, 1),
    }
    print(json.dumps(result))


def _tree(root: int) -> list[int]:
    """Return a process and all below it."""
    found = [root]
    for process in found:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


def _usage(process: int) -> Usage:
    wake_ups = 0
    for status in Path(f"/proc/{process}/task").glob("*/status"):
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        wake_ups += int(lines["voluntary_ctxt_switches"])
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return Usage(wake_ups, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def _memory(process: int) -> tuple[int, int]:
    """Return the bytes of the proportional set size, and those of KV and weights, which it leaves out."""
    rest, kv_and_weights, runs = 0, 0, list[Mapping]()
    for mapping in _mappings(process):
        if mapping.path.endswith(WEIGHTS):
            kv_and_weights += mapping.size
        elif mapping.path or not mapping.has_advice:
            rest += mapping.size
        elif runs and runs[-1].end == mapping.begin:
            runs[-1] = replace(mapping, begin=runs[-1].begin, size=runs[-1].size + mapping.size)
        else:
            runs.append(mapping)
    kv = sum(run.size for run in runs if run.end - run.begin >= LEAST_KV)
    return rest + sum(run.size for run in runs) - kv, kv_and_weights + kv


def _mappings(process: int) -> Iterator[Mapping]:
    begin, end, size, path = 0, 0, 0, ""
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        words = line.split()
        if words[0] == "Pss:":
            size = 1024 * int(words[1])
        elif words[0] == "VmFlags:":
            yield Mapping(begin, end, size, path, bool({"hg", "nh"} & set(words)))
        elif not words[0].endswith(":"):
            begin, end = (int(number, 16) for number in words[0].split("-"))
            path = words[-1] if len(words) > 5 else ""


def _name(process: int) -> str:
    words = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ").split()
    return next((word for word in words[1:] if word.startswith("tokenmill.")), "server")


if __name__ == "__main__":
    main()
