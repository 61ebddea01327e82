"""Time simulations in seconds of one core: the chat profile, and a trace of Mooncake's form on engines.

    python -m benchmarks.simulator_speed [--requests 1000] [--engines 4]

Steps take what a made step model says, some tens of milliseconds as those of a small model on two cores; what a
simulation takes depends on their number alone. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np
from benchmarks.simulation import write_trace

from tokenmill.engine.loop.step_log import LogHeader
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.lab.bench.report import machine_facts
from tokenmill.lab.simulate.simulation import Simulation
from tokenmill.lab.simulate.step_model import KNOTS, StepModel
from tokenmill.lab.simulate.traces import TraceOptions, read_trace

STEPS = StepModel(
    fixed=0.03,
    rates=[0.001] * len(KNOTS),
    terms=[0.0002, 0.0, 1e-7, 1e-8, 0.0],
    largest=[10**9] * 6,
    ratios=np.linspace(0.8, 1.2, 101).tolist(),
    error=0.1,
    num_steps=0,
)
CHAT_RATE, MOONCAKE_RATE = 1.4, 2.0
BLOCK = 512


def write_conversations(path: Path, count: int) -> None:
    """A trace of Mooncake's form: most requests go on from an earlier one, prompts of some thousand tokens."""
    source, before, lines, now, fresh = random.Random(0), [[0]], [], 0.0, 1
    for _ in range(count):
        now += source.expovariate(MOONCAKE_RATE)
        hashes = list(source.choice(before[-100:])) if source.random() < 0.7 else [0]
        added = source.randint(1, 8)
        hashes += range(fresh, fresh + added)
        fresh += added
        before.append(hashes if len(hashes) < 40 else [0])
        length = BLOCK * (len(hashes) - 1) + source.randint(1, BLOCK)
        output = source.randint(20, 350)
        lines.append({"timestamp": 1000 * now, "input_length": length, "output_length": output, "hash_ids": hashes})
    path.write_text("\n".join(map(json.dumps, lines)))


def measure(trace: Path, num_engines: int, budget: int) -> dict[str, float]:
    """The seconds that a trace takes, on the simulated clock and of the processor."""
    header = LogHeader(
        scheduler=SchedulerConfig(256, budget),
        num_pages=16384,
        page_size=16,
        enable_prefix_caching=True,
        max_model_len=32768,
        vocab_size=151936,
        eos_token_ids=[],
        depth=1,
    )
    began = time.process_time()
    arrivals = read_trace(trace, TraceOptions(vocab_size=151936, block_size=BLOCK))
    outcome = Simulation(header=header, model=STEPS, num_engines=num_engines, seed=0).run(arrivals)
    taken = time.process_time() - began
    summary = outcome.summary()
    figures = {"simulated": outcome.seconds, "seconds": taken, "steps": outcome.num_steps}
    return figures | {"times_real": outcome.seconds / taken, "busy": summary["busy"], "errors": summary["errors"]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--engines", type=int, default=4)
    given = parser.parse_args()
    document: dict[str, object] = {"benchmark": "simulator_speed", "machine": machine_facts()}
    with tempfile.TemporaryDirectory() as name:
        chat, conversations = Path(name) / "chat", Path(name) / "conversations"
        write_trace(chat, given.requests, CHAT_RATE, 1)
        write_conversations(conversations, given.requests)
        document["chat"] = measure(chat, 1, 512)
        document["mooncake"] = measure(conversations, given.engines, 8192)
    for kind in ("chat", "mooncake"):
        print(kind, document[kind])
    print(json.dumps(document))


if __name__ == "__main__":
    main()
