"""Measure where the time of a step goes, with random weights in the shape of Qwen3-0.6B.

    python -m tools.gpu.profile_step [--device cpu] [--seconds 150]

Start, memory; then for decodes at a context of 1,024 and batch 1, 8, 64 and 256: the graph's replay alone by events on
the device, `launch` on the host, the whole engine's step, a table of the replay's kernels with what attention, products
and head reach; the same for one prompt of 8,192 tokens, which has no graph; and the sampler alone. A row each as it
comes, one line of JSON last.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.gpu.benchmarks import Rates, decode_plans, decode_times, prompt_plan
from tools.gpu.engines import built
from tools.gpu.folders import QWEN3_0_6B, TINY, write_config
from tools.gpu.kernel_times import Row, kernel_rows, profiled, step_costs
from tools.gpu.machine import copy_rate, device_seconds, make_platform, matmul_rate, seconds_of
from tools.gpu.rows import Rows, guarded, parse

from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.runner.model_runner import ModelRunner
from tokenmill.model.sampling.draws import RECORD, describe, pack
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.startup.assembly.setup import BuiltEngine

SAMPLERS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(temperature=0.6),
    "top_k 20, top_p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure until it is done or the time is up."""
    options = parse(__doc__ or "", argv, 150)
    platform = make_platform(options.device)
    with tempfile.TemporaryDirectory() as folder, Rows(options.seconds) as rows:
        rows.take(measure(platform, Path(folder)))
    return int(rows.has_failed)


def measure(platform: Any, folder: Path) -> Iterator[Row]:
    """All rows."""
    is_dry = platform.name != "cuda"
    rates = Rates(copy_rate(platform), matmul_rate(platform))
    yield {"what": "rates", "copy_gb_per_s": rates.copy_bytes / 1e9, "matmul_tflops": rates.operations / 1e12}
    write_config(folder, TINY if is_dry else QWEN3_0_6B)
    batches, context, length = ((1,), 6, 12) if is_dry else ((1, 8, 64, 256), 1024, 8192)
    limits: dict[str, Any] = {"max_model_len": length + 16, "max_num_batched_tokens": length, "async_scheduling": True}
    limits |= {"max_num_seqs": max(batches), "load_format": "dummy"}
    if is_dry:
        limits |= {"num_pages": 32, "dtype": "float32"}
    with built(folder, platform, **limits) as parts:
        yield {"what": "start", **parts.ready.seconds}
        yield memory_row(parts, platform)
        profile = StepProfile(parts.engine, folder, platform, rates)
        for batch in batches:
            yield from guarded(f"decode, batch {batch}", profile.decode(batch, context))
        yield from guarded("prompt", profile.prompt(length))
        yield {**memory_row(parts, platform), "what": "memory after the steps"}
        for batch in batches:
            yield from guarded("sampler", sampler_rows(batch, profile.architecture.vocab_size, platform))


def memory_row(parts: BuiltEngine, platform: Any) -> Row:
    """Return the device's memory, now and at most, and what the engine says of its graphs."""
    ready = parts.ready
    peak = torch.accelerator.max_memory_allocated() if platform.name == "cuda" else None
    row: Row = {"what": "memory", "weights_mib": ready.weight_bytes / 2**20, "kv_mib": ready.kv_bytes / 2**20}
    return {
        **row,
        "peak_mib": peak and peak / 2**20,
        "attention": f"{ready.attention_backend}: {ready.attention_reason}",
    }


class StepProfile:
    """Steps of one engine, launched past its scheduler; their pages and tokens are no matter."""

    def __init__(self, engine: Engine, folder: Path, platform: Any, rates: Rates) -> None:
        self.architecture = read_architecture(folder)
        self._engine = engine
        self._platform = platform
        self._rates = rates
        self._page_size = engine.scheduler.kv.page_size
        self._num_steps = 12 if platform.name == "cuda" else 2

    def decode(self, batch: int, context: int) -> Iterator[Row]:
        """Steps of `batch` requests with `context` tokens each."""
        what = f"decode, batch {batch}, context {context}"
        pages, there = -(-(context + self._num_steps) // self._page_size), self._engine.scheduler.kv.pool.num_usable
        if batch * pages > there:
            yield {"what": what, "skipped": f"its KV takes {batch * pages} pages, there are {there}"}
            return
        # What failed before is no matter here.
        self._engine.executor.recover()
        launches, waiting = [], []
        for plan in decode_plans(batch, context, pages, self._num_steps):
            start = time.perf_counter()
            waiting.append(self._engine.executor.launch(plan))
            launches.append(time.perf_counter() - start)
            if len(waiting) == 2:
                waiting.pop(0).result()
        waiting.pop().result()
        runner = runner_of(self._engine)
        replay, seen = replay_of(runner, batch), batch * (context + self._num_steps - 1)
        with torch.inference_mode(), stream_of(runner):
            seconds = device_seconds(replay, self._platform)
            calls = profiled(replay, self._platform)
        costs = step_costs(self.architecture, batch, batch, seen)
        floor = sum(
            max(cost.num_bytes / self._rates.copy_bytes, cost.operations / self._rates.operations)
            for cost in costs.values()
        )
        row: Row = {"what": what, "replay_ms": 1e3 * seconds, "floor_ms": 1e3 * floor, "of_floor": floor / seconds}
        # The first steps enter the rows.
        yield row | {"launch_ms": 1e3 * statistics.median(launches[len(launches) // 3 :])}
        steps = decode_times(self._engine, batch, context, self._num_steps, lambda: None)
        yield {"what": what, "engine_step_ms": 1e3 * statistics.median(steps) if steps else None}
        yield from kernel_rows(what, calls, costs, self._rates)

    def prompt(self, length: int) -> Iterator[Row]:
        """One step of one whole prompt."""
        what = f"prompt of {length} tokens"
        pages = -(-length // self._page_size)
        self._engine.executor.recover()
        launches = []

        def step() -> None:
            plan = prompt_plan(length, pages, 0)
            start = time.perf_counter()
            outcome = self._engine.executor.launch(plan)
            launches.append(time.perf_counter() - start)
            outcome.result()

        seconds = seconds_of(step, self._platform, 3 if self._platform.name == "cuda" else 1)
        yield {"what": what, "step_ms": 1e3 * seconds, "launch_ms": 1e3 * statistics.median(launches)}
        # A causal token sees half of the prompt on average.
        costs = step_costs(self.architecture, length, 1, length * length / 2)
        yield from kernel_rows(what, profiled(step, self._platform), costs, self._rates)


def runner_of(engine: Engine) -> ModelRunner:
    """Return the runner of steps on the device; its executor runs them in line."""
    runner = getattr(engine.executor, "runner", None)
    assert isinstance(runner, ModelRunner), "the executor of a device runs in line"
    return runner


def stream_of(runner: ModelRunner) -> Any:
    """The stream of the steps, to be entered."""
    return runner._transport


def replay_of(runner: ModelRunner, batch: int) -> Callable[[], object]:
    """Replays the smallest graph that holds a batch, with the inputs that it had last."""
    assert runner.graphs is not None, "decodes are captured"
    graphs = {rows: graph for (rows, tokens), graph in runner.graphs._graphs._graphs.items() if tokens == 1}
    return graphs[min(size for size in graphs if size >= batch)].replay


def sampler_rows(batch: int, vocab_size: int, platform: Any) -> Iterator[Row]:
    """The sampler alone, on logits of an even spread."""
    from tokenmill.model.sampling import triton_draw

    logits = 3 * torch.randn(batch, vocab_size, device=platform.device)
    for name, params in SAMPLERS.items():
        draw = describe(params, vocab_size)._replace(uniform=0.5)
        draws = torch.from_numpy(pack(np.array([draw] * batch, dtype=RECORD))).to(platform.device)
        seconds = device_seconds(lambda draws=draws: triton_draw.draw(logits, draws), platform)  # type: ignore[misc]
        yield {"what": f"sampler, {name}, batch {batch}", "us": 1e6 * seconds}


if __name__ == "__main__":
    sys.exit(main())
