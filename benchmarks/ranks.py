"""Two ranks of one thread against one process of two threads: the same model, steps in turns.

    python benchmarks/ranks.py [--quantization none,int8] [--ranks 2] [--stages] [--turns 7] [--steps 8]

Qwen3-0.6B's shape with random weights, on the CPU. Both engines are in memory at once, and take turns: a decode step of
1, 8 and 32 requests behind prompts of 64 tokens, and a prompt of 512 tokens in one step. A turn is the mean of some
steps. Of each case: medians in milliseconds with quartiles, the median quotient of all turns (`speed`), that of the
fastest turns (`best`), and that of the processor time of all turns (`work`), which says what ranks do twice and not
what they wait for. Tokens are compared as well. With --stages each rank is a stage with some of the layers; a step is
then as many turns of the engine as there are stages, which bring what one brings otherwise, and a prompt runs in chunks
of 128 tokens, in several stages at once. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.gpu.folders import QWEN3_0_6B, write_config

from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.startup.assembly.setup import build_engine

DECODES, PROMPT, CONTEXT = (1, 8, 32), 512, 64
CHUNK = 128


class Contender:
    """An engine, the threads that torch may use while it runs, and what it has said."""

    def __init__(self, engine: Engine, num_threads: int, num_stages: int) -> None:
        self.engine = engine
        self._num_stages = num_stages
        self.tokens: dict[str, list[int]] = {}
        self._num_threads = num_threads
        group: Any = getattr(engine.executor, "_group", None)
        self._others = [] if group is None else [child.pid for child in group._children._processes.values()]
        self._ids: list[str] = []
        self._number = 0

    def begin(self, requests: int, length: int, max_tokens: int) -> None:
        """Take in requests whose prompts are nobody else's."""
        for _ in range(requests):
            self._number += 1
            name = f"r{self._number}"
            ids = [(self._number * 7919 + place * 104729) % 150_000 for place in range(length)]
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
            self.engine.add(AddRequest(id=name, prompt_token_ids=ids, params=params, cache_salt=name))
            self._ids.append(name)
            self.tokens[name] = []

    def work(self) -> float:
        """Processor seconds so far, of this process and of the ranks that it has started."""
        others = (Path(f"/proc/{pid}/schedstat").read_text().split()[0] for pid in self._others)
        return time.process_time() + sum(map(int, others)) / 1e9

    def steps(self, count: int) -> tuple[float, float]:
        """Seconds of a step, the mean of some, and processor seconds."""
        torch.set_num_threads(self._num_threads)
        began, before = time.perf_counter(), self.work()
        for _ in range(count * self._num_stages):
            for output in self.engine.step():
                self.tokens[output.id].extend(output.token_ids)
        return (time.perf_counter() - began) / count, (self.work() - before) / count

    def end(self) -> None:
        """Let go of all requests."""
        self.engine.abort(self._ids)
        self._ids.clear()
        while self.engine.has_work:
            self.engine.step()

    def prompt(self) -> tuple[float, float]:
        """The same of the step that computes a prompt."""
        self.begin(1, PROMPT, 1)
        torch.set_num_threads(self._num_threads)
        began, before = time.perf_counter(), self.work()
        while not self.tokens[self._ids[-1]]:
            self.steps(1)
        took = time.perf_counter() - began, self.work() - before
        self.end()
        return took


def measure(folder: Path, quantization: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one form of the weights."""
    ranks = options.ranks
    contenders = []
    for size, threads in ((ranks, 1), (1, ranks)):
        config = EngineConfig(
            model=str(folder),
            load_format="dummy",
            device="cpu",
            quantization=quantization,
            num_threads=threads,
            tensor_parallel_size=1 if options.stages else size,
            pipeline_parallel_size=size if options.stages else 1,
            long_prefill_token_threshold=CHUNK if options.stages and size > 1 else 0,
            num_pages=1024,
            max_num_seqs=64,
            max_num_batched_tokens=PROMPT,
            max_model_len=2048,
            async_scheduling=False,
        )
        num_stages = config.pipeline_parallel_size
        contenders.append(Contender(build_engine(config.resolve()).engine, threads, num_stages))
    together, alone = contenders
    rows = []
    try:
        for requests in (*DECODES, 0):
            name = f"decode {requests}" if requests else f"prompt {PROMPT}"
            for one in contenders if requests else ():
                one.begin(requests, CONTEXT, 1000)
                one.steps(-(-requests * CONTEXT // PROMPT) + 2)
            pairs = []
            for turn in range(options.turns + 1):
                # Who begins changes from turn to turn; the first turn only warms up.
                order = contenders if turn % 2 else contenders[::-1]
                took = {id(one): one.steps(options.steps) if requests else one.prompt() for one in order}
                if turn:
                    pairs.append((took[id(together)], took[id(alone)]))
            for one in contenders:
                one.end()
            rows.append(_row(quantization, name, pairs))
        for name, tokens in alone.tokens.items():
            assert all(map(int.__eq__, tokens, together.tokens[name])), "the ranks said something else"
    finally:
        for one in contenders:
            one.engine.close()
    return rows


def _row(quantization: str, case: str, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Return a case, measured, and print it. `pairs`: what `steps` gave of the ranks, and of one process."""
    (ranks, ranks_work), (alone, alone_work) = (list(zip(*side, strict=True)) for side in zip(*pairs, strict=True))
    row = {"quantization": quantization, "case": case, "ranks_ms": _quartiles(ranks), "alone_ms": _quartiles(alone)}
    row["speed"] = round(statistics.median(two / one for one, two in zip(ranks, alone, strict=True)), 3)
    row["best"] = round(min(alone) / min(ranks), 3)
    row["work"] = round(sum(alone_work) / sum(ranks_work), 3)
    print(*(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def _quartiles(seconds: Sequence[float]) -> list[float]:
    """Median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return [round(1000 * value, 2) for value in (middle, low, high)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quantization", default="none,int8")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", action="store_true", help="each rank is a stage")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), QWEN3_0_6B)
        rows = [row for one in options.quantization.split(",") for row in measure(Path(folder), one, options)]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
