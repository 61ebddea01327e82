"""An idle server: how often it wakes its machine, what of a core it takes, and the memory of its processes.

    python benchmarks/idle.py [--model MODEL] [--seconds 30] [flags of `tokenmill serve`]

The server answers one request and is left alone until its parts rest. A wake-up is a voluntary switch of a thread, as
Linux counts them in /proc: each is a wait that ended. Memory is the proportional set size (PSS) of each process: what
several share counts in parts. One line a process, then one line of JSON. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

# Parts rest after ten seconds without work; looks in vain end before.
SETTLE_SECONDS = 20.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of a process since it began: waits of its threads that ended, and seconds of processor time."""

    wake_ups: int
    cpu: float


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
    wake_ups = cpu = anonymous = mapped = 0.0
    for process in processes:
        now, memory = _usage(process), _memory(process)
        woke = (now.wake_ups - before[process].wake_ups) / seconds
        took = 100 * (now.cpu - before[process].cpu) / seconds
        print(
            f"{woke:5.1f} wake-ups/s {took:5.2f}% of a core {memory['Pss_Anon'] / MIB:6.1f} MiB of its own "
            f"{(memory['Pss_File'] + memory['Pss_Shmem']) / MIB:6.1f} MiB of files and shared  {_name(process)}"
        )
        wake_ups, cpu = wake_ups + woke, cpu + took
        anonymous, mapped = anonymous + memory["Pss_Anon"], mapped + memory["Pss_File"] + memory["Pss_Shmem"]
    result = {
        "model": model,
        "wake_ups_per_second": round(wake_ups, 1),
        "percent_of_a_core": round(cpu, 2),
        "own_mib": round(anonymous / MIB, 1),
        "mapped_mib": round(mapped / MIB, 1),
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


def _memory(process: int) -> dict[str, int]:
    """Return the entries of smaps_rollup in bytes."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
    return {name: 1024 * int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}


def _name(process: int) -> str:
    words = Path(f"/proc/{process}/cmdline").read_bytes().decode().split("\0")
    return next((word for word in words[1:] if word.startswith("tokenmill.")), "server")


if __name__ == "__main__":
    main()
