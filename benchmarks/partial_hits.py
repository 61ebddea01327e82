"""The worth of copying the equal beginning of a page: processor time of a first token, copied or computed, in turns.

    python benchmarks/partial_hits.py [--layers 28] [--page-sizes 16 64 256] [--kv-cache-dtype auto]

Qwen3-0.6B's shape with random weights on the CPU, one thread. A prompt of two pages is cached; another one has its
first page and the beginning of its second, then eight tokens of its own. It is answered with one token, by an engine
that copies a page whatever its size and by one that computes. Medians of the turns; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools.gpu.folders import QWEN3_0_6B, write_config

from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.loop.step_log import LogHeader
from tokenmill.engine.runner.executor import Executor
from tokenmill.startup.assembly.capability import Assembly
from tokenmill.startup.assembly.memory import StepMemory
from tokenmill.startup.assembly.partial_hits import PartialHits
from tokenmill.startup.assembly.setup import build_engine

NUM_NEW = 8


class AnyCopies(PartialHits):
    """Copies a single token, of pages of any size."""

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Take part."""
        return cls()

    def settle(self, header: LogHeader, memory: StepMemory, executor: Executor) -> LogHeader:
        """Let the scheduler order copies."""
        return msgspec.structs.replace(header, least_copied=1)


def main() -> None:
    """Measure all page sizes and print a line for each place."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        shape = {**QWEN3_0_6B, "num_hidden_layers": options.layers}
        model = str(write_config(Path(folder), shape))
        for page_size in options.page_sizes:
            engines = {name: start(model, page_size, options, name == "copied") for name in ("copied", "computed")}
            for num_equal in sorted({page_size // 4, page_size // 2, page_size - 1}):
                row: dict[str, float] = {"page_size": page_size, "equal_tokens": num_equal}
                row |= measure(engines, page_size, num_equal, options.turns)
                print(row, flush=True)
                found.append(row)
    print(json.dumps({"layers": options.layers, "kv_cache_dtype": options.kv_cache_dtype, "rows": found}))


def start(model: str, page_size: int, options: argparse.Namespace, copies: bool) -> Engine:
    """Return an engine with one thread that has copied a page before."""
    config = EngineConfig(
        model=model,
        device="cpu",
        load_format="dummy",
        max_num_seqs=1,
        max_model_len=1024,
        num_threads=1,
        page_size=page_size,
        num_pages=8192 // page_size,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    built = build_engine(config.resolve(), capabilities=[AnyCopies] if copies else [])
    for _ in built.idle_work:
        pass
    return built.engine


def measure(engines: dict[str, Engine], page_size: int, num_equal: int, turns: int) -> dict[str, float]:
    """Return the median milliseconds of the processor for a first token, of each engine."""
    rng, times = np.random.default_rng(num_equal), {name: list[float]() for name in engines}
    for number in range(turns + 1):
        first = rng.integers(1, 50_000, 2 * page_size + 1).tolist()
        fork = first[: page_size + num_equal] + rng.integers(50_000, 100_000, NUM_NEW).tolist()
        for name, engine in engines.items():
            ask(engine, f"{num_equal}-{number}-first", first)
            began = time.process_time()
            num_cached = ask(engine, f"{num_equal}-{number}", fork)
            times[name].append(1e3 * (time.process_time() - began))
            assert num_cached == page_size + (num_equal if name == "copied" else 0)
    return {f"{name}_ms": round(statistics.median(spent[1:]), 2) for name, spent in times.items()}


def ask(engine: Engine, request_id: str, prompt: list[int]) -> int:
    """Run a request to its first token; return the tokens of its prompt that it did not run."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
    engine.add(AddRequest(id=request_id, prompt_token_ids=prompt, params=params))
    while True:
        for output in engine.step():
            return output.num_cached_tokens


if __name__ == "__main__":
    main()
