"""Parts of a server are killed, crash, hang and get what they cannot prepare, under load: every stream is whole, and
what it is without that.

    python -m tests.server.chaos [--streams 64] [--faults 20] [--engines 2] [--api-servers 1]

Prints what each fault was, and how long the server took to say that it is well again; one line of JSON last.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.checkpoints import make_checkpoint
from tests.server.faulty_engine import CRASH
from tests.server.hanging_text_worker import KILLED
from tests.server.running_server import RunningServer, start_server
from tests.server.streams import answers
from tokenmill.config import EngineConfig
from tokenmill.frontend.chat_template import load_chat_template
from tokenmill.replicas.topology import EngineSpec

ENGINE = "tests.server.faulty_engine"
WORKER = "tests.server.hanging_text_worker"
# Longer than any honest step of the test's model on a loaded machine; what hangs is killed after it.
DEADLINE_SECONDS = 4.0
# What the log says of each death.
DEATH = "; it is started again"
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


def start(model: Path, engines: int, api_servers: int = 1):
    """A server whose engines crash when asked to; nothing but time limits how often its parts come back."""
    engine = EngineConfig(model=str(model), dtype="bfloat16", num_pages=600, max_num_seqs=16)
    specs = tuple(EngineSpec(index) for index in range(engines))
    how = {"engine_timeout": DEADLINE_SECONDS, "max_restarts": 1000, "tool_call_parser": "hermes"}
    how |= {"api_server_count": api_servers}
    how |= {"chat_template": poisoned_template(model), "worker_module": WORKER}
    return start_server(engine, ENGINE, engines=specs, enable_auto_tool_choice=True, **how)


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
    num_deaths = server.output().count(DEATH)
    began = time.monotonic()
    os.kill(victim, number)
    server.wait_for(lambda: server.output().count(DEATH) > num_deaths, 120)
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


async def disturbed(server: RunningServer, count: int, faults: list[str], rng: random.Random) -> tuple[list, list]:
    """What clients hear while these faults happen, and how long each lasted: the streams come again until all have."""
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
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr)
    rng = random.Random(options.seed)
    kinds = [*FAULTS, *POISONS]
    faults = kinds * -(-options.faults // len(kinds))
    rng.shuffle(faults)
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder, "tiny"), "qwen3")
        began = time.monotonic()
        with start(model, options.engines, options.api_servers) as server:
            start_seconds = time.monotonic() - began
            lasted = check(server, options.streams, faults[: options.faults], rng)
    seconds = {fault: [round(one, 1) for name, one in lasted if name == fault] for fault in kinds}
    print(
        json.dumps(
            {
                "seed": options.seed,
                "streams": options.streams,
                "faults": len(lasted),
                "differ": 0,
                "start_seconds": round(start_seconds, 1),
                "median_seconds": {name: statistics.median(own) for name, own in seconds.items() if own},
                "seconds": seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
