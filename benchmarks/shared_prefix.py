"""Decode steps of requests behind a common prefix: its pages read once for all of them, or by each.

    python benchmarks/shared_prefix.py [--quantization int8] [--kv-cache-dtype int8] [--requests 32] [--prefix 2048]

Qwen3-0.6B's shape with random weights, on the CPU. "By each" gives every request a first page of its own, so that
nothing is found to be shared while the same memory is read. Both are measured in turns in one process; medians with
quartiles, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.gpu.folders import QWEN3_0_6B, write_config

from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.model.attention.backends.native import NativeAttention, NativePlan
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.startup.assembly.setup import build_engine

OWN_TOKENS, MAX_TOKENS = 30, 200
TURNS, STEPS = 12, 3


class PagesApart:
    """Gives every request of a full batch a first page of its own, while `is_on`."""

    def __init__(self, num_requests: int) -> None:
        self.num_requests = num_requests
        self.is_on = False

    def install(self) -> None:
        """Change the page table of a step before it is planned."""
        plan_as_it_is = NativeAttention.plan

        def plan(attention: NativeAttention, batch: ForwardBatch) -> NativePlan:
            if self.is_on and len(batch.query_lens) == self.num_requests:
                batch.page_table[:, 0] = torch.arange(1, self.num_requests + 1)
            return plan_as_it_is(attention, batch)

        NativeAttention.plan = plan  # type: ignore[method-assign]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prefix", type=int, default=2048)
    options = parser.parse_args()
    apart = PagesApart(options.requests)
    apart.install()
    with tempfile.TemporaryDirectory() as folder:
        engine = start(write_config(Path(folder), QWEN3_0_6B), options)
        times = measure(engine, apart)
        engine.close()
    quartiles = {
        name: [round(1e3 * value, 1) for value in statistics.quantiles(found)] for name, found in times.items()
    }
    ratio = statistics.median(times["by each"]) / statistics.median(times["once"])
    print(json.dumps({**vars(options), "step_ms": quartiles, "ratio": round(ratio, 2)}))


def start(folder: Path, options: argparse.Namespace) -> Engine:
    """An engine that has all requests decoding."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        load_format="dummy",
        max_num_seqs=options.requests,
        max_model_len=options.prefix + OWN_TOKENS + MAX_TOKENS,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        num_pages=(options.prefix + options.requests * (OWN_TOKENS + MAX_TOKENS)) // 16 + 2 * options.requests,
    )
    engine = build_engine(config.resolve()).engine
    rng = random.Random(0)
    prefix = [rng.randrange(1, 250) for _ in range(options.prefix)]
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=MAX_TOKENS)
    for number in range(options.requests):
        own = [rng.randrange(1, 250) for _ in range(OWN_TOKENS)]
        engine.add(AddRequest(id=str(number), prompt_token_ids=prefix + own, params=params))
    while len(engine.step()) < options.requests:
        pass
    return engine


def measure(engine: Engine, apart: PagesApart) -> dict[str, list[float]]:
    """Seconds of steps, in turns; the first step after each change is not counted."""
    times: dict[str, list[float]] = {"by each": [], "once": []}
    for _ in range(TURNS):
        for name, found in times.items():
            apart.is_on = name == "by each"
            engine.step()
            for _ in range(STEPS):
                began = time.perf_counter()
                engine.step()
                found.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
