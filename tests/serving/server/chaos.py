"""Parts of a server are killed, crash, hang and get what they cannot prepare, under load: every stream is whole, and
what it is without that.

    python -m tests.serving.server.chaos [--streams 64] [--faults 20] [--engines 2] [--api-servers 1]
        [--logs file,closed,full]

The faults are shared out among servers whose log is a file, a pipe that nobody reads any more, and a disk that is full,
as is the one below their KV tier then, where this user may mount one.
Prints what each fault was, and how long the server took to say that it is well again; one line of JSON last.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.checkpoints import make_checkpoint
from tests.seeding import root_seed
from tests.serving.server.faulty_engine import CRASH
from tests.serving.server.hanging_text_worker import KILLED
from tests.serving.server.running_server import RunningServer, start_server
from tests.serving.server.streams import answers
from tokenmill.config.configs import EngineConfig
from tokenmill.ipc.topology import EngineSpec
from tokenmill.serving.frontend.chat_template import load_chat_template

ENGINE = "tests.serving.server.faulty_engine"
WORKER = "tests.serving.server.hanging_text_worker"
# Longer than any honest step of the test's model on a loaded machine; what hangs is killed after it.
DEADLINE_SECONDS = 4.0
# What is done to which part.
FAULTS = {
    "an engine is killed": (ENGINE, signal.SIGKILL),
    "a text worker is killed": (WORKER, signal.SIGKILL),
    "a native kernel crashes": (ENGINE, CRASH),
    "an engine hangs": (ENGINE, signal.SIGSTOP),
    "a text worker hangs": (WORKER, signal.SIGSTOP),
}
# What is said in a chat that nobody can prepare, and how that ends: its template goes on for ever, its tokenizer dies.
ENDLESS = "GO ROUND FOR EVER"
POISONS = {"a template never ends": (ENDLESS, 400), "a chat kills text workers": (KILLED, 500)}
_POISONED = """
{%- if ENDLESS in messages[-1].content | string -%}
    {%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{%- endif -%}
"""


def poisoned_template(model: Path) -> str:
    """The template of a model, which never ends for a chat."""
    template = load_chat_template(model, {})
    assert template is not None, "the test's model has one"
    return _POISONED.replace("ENDLESS", repr(ENDLESS)) + template.source


@contextlib.contextmanager
def start(model: Path, engines: int, api_servers: int = 1, log: str = "file"):
    """A server whose engines crash when asked to; nothing but time limits how often its parts come back.

    `log`: where that goes, one of `LOGS`.
    """
    engine = EngineConfig(model=str(model), dtype="bfloat16", num_pages=600, max_num_seqs=16)
    specs = tuple(EngineSpec(index) for index in range(engines))
    how = {"engine_timeout": DEADLINE_SECONDS, "max_restarts": 1000, "tool_call_parser": "hermes"}
    how |= {"api_server_count": api_servers, "engines": specs, "enable_auto_tool_choice": True}
    how |= {"chat_template": poisoned_template(model), "worker_module": WORKER}
    with LOGS[log]() as output, small_disk() as disk:
        if output is not None:
            how["output"] = output
        if log == "full":
            engine = dataclasses.replace(engine, kv_disk=disk)
        with start_server(engine, ENGINE, **how) as server:
            yield server


@contextlib.contextmanager
def small_disk():
    """A folder on a disk that is full after a few pages; on an ordinary one, where this user may mount none."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", folder]
        is_mounted = shutil.which("mount") and subprocess.run(mount, capture_output=True, check=False).returncode == 0
        try:
            yield folder
        finally:
            if is_mounted:
                subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def ended():
    """A pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        yield output


def full():
    """A disk without room."""
    return open("/dev/full", "w")


LOGS = {"file": contextlib.nullcontext, "closed": ended, "full": full}


def wait_until_well(server: RunningServer) -> None:
    """Until no part recovers, and nobody is under suspicion of a death any more."""
    server.wait_for(lambda: httpx.get(f"{server.url}/health", timeout=30).status_code == 200, 120)


def strike(server: RunningServer, fault: str, rng: random.Random) -> float:
    """Do it to one of the parts; seconds until the server is well again.

    Not before the server has seen the death: /health says ok until then, and the next fault would meet this one.
    """
    if fault in POISONS:
        return poison(server, *POISONS[fault])
    module, number = FAULTS[fault]
    victim = rng.choice([pid for called, pid in server.children().items() if module in called])
    before = num_restarts(server)
    began = time.monotonic()
    os.kill(victim, number)
    server.wait_for(lambda: num_restarts(server) > before, 120)
    wait_until_well(server)
    return time.monotonic() - began


def poison(server: RunningServer, text: str, status: int) -> float:
    """Send a chat that nobody can prepare, which must end with this status; seconds until the server is well again."""
    began = time.monotonic()
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == status, reply.text
    wait_until_well(server)
    return time.monotonic() - began


def num_restarts(server: RunningServer) -> float:
    """Of all parts."""
    try:
        return server.metric("restarts_total")
    except KeyError:
        return 0.0


async def disturbed(server: RunningServer, count: int, faults: list[str], rng: random.Random) -> tuple[list, list]:
    """Return the clients' streams during these faults, and how long each lasted: streams come again until all have."""
    heard, lasted = [], []
    while faults:
        calls = asyncio.ensure_future(answers(server.url, count))
        while faults and not calls.done():
            await asyncio.sleep(rng.uniform(0.05, 1.0))
            if not calls.done():
                fault = faults.pop()
                lasted.append((fault, await asyncio.to_thread(strike, server, fault, rng)))
                print(f"{fault}: {lasted[-1][1]:.1f} s", file=sys.stderr, flush=True)
        heard.append(await calls)
    return heard, lasted


def check(server: RunningServer, count: int, faults: list[str], rng: random.Random) -> list[tuple[str, float]]:
    """Compare streams with and without faults; how long each fault lasted.

    Raises:
        AssertionError: a stream differs, or something is left.
    """
    undisturbed = asyncio.run(answers(server.url, count))
    heard, lasted = asyncio.run(disturbed(server, count, faults, rng))
    for again in heard:
        for number, (want, got) in enumerate(zip(undisturbed, again, strict=True)):
            assert got == want, f"stream {number}"
    wait_until_well(server)
    server.wait_until_unused()
    assert "Traceback" not in server.output()
    return lasted


def main() -> None:
    """Check and print.

    Raises:
        AssertionError: a stream differs, or something is left.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--api-servers", type=int, default=1)
    parser.add_argument("--logs", default=",".join(LOGS), help="one or several of them, with commas between")
    parser.add_argument("--seed", type=int, default=root_seed())
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr)
    rng = random.Random(options.seed)
    kinds = [*FAULTS, *POISONS]
    faults = kinds * -(-options.faults // len(kinds))
    rng.shuffle(faults)
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder, "tiny"), "qwen3")
        lasted, lost, logs = [], {}, options.logs.split(",")
        for number, log in enumerate(logs):
            own = faults[number : options.faults : len(logs)]
            began = time.monotonic()
            with start(model, options.engines, options.api_servers, log) as server:
                start_seconds = time.monotonic() - began
                lasted += check(server, options.streams, own, rng)
                lost[log] = server.metric("log_lines_lost_total")
                assert (lost[log] > 0) == (log != "file"), "what nobody took is counted"
    seconds = {fault: [round(one, 1) for name, one in lasted if name == fault] for fault in kinds}
    print(
        json.dumps(
            {
                "seed": options.seed,
                "streams": options.streams,
                "faults": len(lasted),
                "differ": 0,
                "log_lines_lost": lost,
                "start_seconds": round(start_seconds, 1),
                "median_seconds": {name: statistics.median(own) for name, own in seconds.items() if own},
                "seconds": seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
