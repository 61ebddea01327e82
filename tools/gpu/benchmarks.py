"""Speed with dummy weights, beside the floor: what the bytes and operations of a step take at the measured rates."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tools.gpu.engines import generate, running
from tools.gpu.folders import QWEN3_0_6B, QWEN3_14B, TINY, write_config
from tools.gpu.machine import copy_rate, matmul_rate
from tools.gpu.transformers_batching import Work, measure

from tokenmill.core.messages import AddRequest
from tokenmill.core.plan import AdmittedRequest, StepPlan
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.weights.checkpoint import read_architecture

MODELS = {"tiny": TINY, "Qwen3-0.6B": QWEN3_0_6B, "Qwen3-14B": QWEN3_14B}
BATCHES, CONTEXTS = (1, 8, 64, 256), (1024, 8192)
NUM_STEPS = 24


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the device per second: bytes read and written by a copy, operations of a bfloat16 product."""

    copy_bytes: float
    operations: float


class ModelBench:
    """One model's measurements."""

    def __init__(self, name: str, folder: Path, platform: Any, rates: Rates) -> None:
        self.name = name
        self._platform = platform
        self._rates = rates
        self._is_dry = platform.name != "cuda"
        self._architecture: Architecture = read_architecture(folder)
        self._folder = folder

    def rows(self, until: float) -> Iterator[dict[str, Any]]:
        """Decode steps, a prompt, the offline recipe."""
        longest = 64 if self._is_dry else max(CONTEXTS) + NUM_STEPS + 8
        options: dict[str, Any] = {"max_model_len": longest, "max_num_batched_tokens": longest}
        options |= {"max_num_seqs": 2 if self._is_dry else 256, "load_format": "dummy", "async_scheduling": True}
        if self._is_dry:
            options |= {"num_pages": 32, "dtype": "float32"}
        with running(self._folder, self._platform, **options) as engine:
            for batch in [2] if self._is_dry else BATCHES:
                for context in [30] if self._is_dry else CONTEXTS:
                    if time.monotonic() < until:
                        yield self._decode(engine, batch, context)
            yield self._prompt(engine, 40 if self._is_dry else 8192)
            for batch in [2] if self._is_dry else [64, 256]:
                if time.monotonic() < until:
                    yield self._scheduled(engine, batch, 12 if self._is_dry else 1024)
            if time.monotonic() < until:
                yield self._recipe(engine)

    def _decode(self, engine: Engine, batch: int, context: int) -> dict[str, Any]:
        """The time of a step of `batch` requests with `context` tokens each, steps launched two at a time."""
        row: dict[str, Any] = {"model": self.name, "what": f"decode, batch {batch}, context {context}"}
        page_size = engine.scheduler.kv.page_size
        steps = 3 if self._is_dry else NUM_STEPS
        pages = -(-(context + steps) // page_size)
        there = engine.scheduler.kv.pool.num_usable
        if batch * pages > there:
            return {**row, "skipped": f"its KV takes {batch * pages} pages, there are {there}"}
        times, waiting = [], []
        last = time.perf_counter()
        for plan in decode_plans(batch, context, pages, steps):
            waiting.append(engine.executor.launch(plan))
            if len(waiting) == 2:
                waiting.pop(0).result()
                times.append(time.perf_counter() - last)
                last = time.perf_counter()
        waiting.pop().result()
        # The first steps enter the rows.
        seconds = statistics.median(times[len(times) // 3 :])
        weights = self._weight_bytes()
        kv = batch * context * self._architecture.kv_bytes_per_token(2)
        floor = max((weights + kv) / self._rates.copy_bytes, 2 * batch * weights / 2 / self._rates.operations)
        return {**row, "ms": 1e3 * seconds, "floor_ms": 1e3 * floor, "of_floor": floor / seconds}

    def _scheduled(self, engine: Engine, batch: int, context: int) -> dict[str, Any]:
        """Decode steps as the whole engine makes them, and what share of such a step the device has nothing to do."""
        row: dict[str, Any] = {"model": self.name, "what": f"engine's decode step, batch {batch}, context {context}"}
        steps = 3 if self._is_dry else NUM_STEPS
        times = decode_times(engine, batch, context, steps, lambda: None)
        if not times:
            return {**row, "skipped": "no step decoded all requests at once"}
        seconds = statistics.median(times)
        row["ms"] = 1e3 * seconds
        if self._is_dry:
            return row
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            count = len(decode_times(engine, batch, context, steps, profile.start))
        busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6 / max(count, 1)
        return {**row, "busy_ms": 1e3 * busy, "idle": max(0.0, 1 - busy / seconds)}

    def _prompt(self, engine: Engine, length: int) -> dict[str, Any]:
        """One prompt in one step, and its operations per second."""
        page_size = engine.scheduler.kv.page_size
        times = []
        for step in range(4):
            plan = prompt_plan(length, -(-length // page_size), step)
            start = time.perf_counter()
            engine.executor.launch(plan).result()
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times[1:])
        architecture = self._architecture
        attention = 2 * sum(layer.attention.q_size for layer in architecture.layers) * length**2
        embeddings = architecture.vocab_size * architecture.hidden_size * (1 if architecture.tie_embeddings else 2)
        # Of a prompt only the last token has logits.
        rate = (2 * (architecture.num_parameters() - embeddings) * length + attention) / seconds
        row = {"model": self.name, "what": f"prompt of {length} tokens", "ms": 1e3 * seconds}
        return {**row, "tflops": rate / 1e12, "of_floor": rate / self._rates.operations}

    def _recipe(self, engine: Engine) -> dict[str, Any]:
        """Return the recipe that peers publish, temperature 0.6."""
        work = recipe(self._architecture.vocab_size, self._is_dry)
        prompts, count = [prompt for prompt, _ in work], len(work)
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=tokens) for _, tokens in work]
        before = engine.stats()
        start = time.perf_counter()
        tokens = sum(map(len, generate(engine, prompts, params)))
        seconds = time.perf_counter() - start
        steps = engine.stats().step - before.step
        row = {"model": self.name, "what": f"offline recipe, {count} sequences", "ms": 1e3 * seconds / max(steps, 1)}
        return {**row, "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}

    def _weight_bytes(self) -> int:
        """Bytes of the weights that a token passes through: without the embedding, where it is not the head too."""
        architecture = self._architecture
        unread = 0 if architecture.tie_embeddings else architecture.vocab_size * architecture.hidden_size
        return 2 * (architecture.num_parameters() - unread)


def decode_times(engine: Engine, batch: int, context: int, steps: int, begin: Callable[[], object]) -> list[float]:
    """Seconds of the engine's steps that carry a token of each of `batch` requests; `begin` before the first."""
    generator = random.Random(batch)
    # While the last prompts are computed the first requests decode already.
    tokens = steps + -(-batch * context // engine.scheduler.config.max_num_batched_tokens) + 2
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=tokens)
    for number in range(batch):
        prompt = [generator.randrange(1, 250) for _ in range(context)]
        engine.add(AddRequest(id=f"scheduled {number}", prompt_token_ids=prompt, params=params))
    times: list[float] = []
    is_full = False
    while engine.has_work:
        start = time.perf_counter()
        outputs = engine.step()
        # Steps that carry a token of each request, and end none: decodes, all of them.
        if is_full and len(outputs) == batch and not any(output.finish_reason for output in outputs):
            times.append(time.perf_counter() - start)
        elif not is_full and len(outputs) == batch:
            is_full = True
            begin()
    return times


def recipe(vocab_size: int, is_dry: bool) -> Work:
    """256 sequences, seed 0, 100 to 1024 tokens in and out, ids up to 10000."""
    generator = random.Random(0)
    count, shortest, longest = (2, 4, 8) if is_dry else (256, 100, 1024)
    largest_id = min(10000, vocab_size - 1)
    prompts = [
        [generator.randint(0, largest_id) for _ in range(generator.randint(shortest, longest))] for _ in range(count)
    ]
    return [(prompt, generator.randint(shortest, longest)) for prompt in prompts]


def decode_plans(batch: int, context: int, pages: int, steps: int) -> Iterator[StepPlan]:
    """Steps of requests in the middle of a text, each on pages of its own; what these hold is no matter."""
    rows = np.arange(batch, dtype=np.int32)
    page_rows = np.repeat(rows, pages)
    page_numbers = np.tile(np.arange(pages, dtype=np.int32), batch)
    page_ids = np.arange(1, batch * pages + 1, dtype=np.int32)
    nothing = np.empty(0, dtype=np.int32)
    for step in range(steps):
        is_first = step == 0
        yield StepPlan(
            step=step,
            new_rows=tuple(_new_row(row, context) for row in range(batch)) if is_first else (),
            request_ids=tuple(map(str, range(batch))),
            rows=rows,
            num_computed=np.full(batch, context - 1 + step, dtype=np.int32),
            num_scheduled=np.ones(batch, dtype=np.int32),
            num_samples=np.ones(batch, dtype=np.int32),
            page_rows=page_rows if is_first else nothing,
            page_numbers=page_numbers if is_first else nothing,
            page_ids=page_ids if is_first else nothing,
        )


def prompt_plan(length: int, pages: int, step: int) -> StepPlan:
    """One step of one whole prompt."""
    return StepPlan(
        step=step,
        new_rows=(_new_row(0, length),),
        request_ids=("0",),
        rows=np.zeros(1, dtype=np.int32),
        num_computed=np.zeros(1, dtype=np.int32),
        num_scheduled=np.full(1, length, dtype=np.int32),
        num_samples=np.ones(1, dtype=np.int32),
        page_rows=np.zeros(pages, dtype=np.int32),
        page_numbers=np.arange(pages, dtype=np.int32),
        page_ids=np.arange(1, pages + 1, dtype=np.int32),
    )


def _new_row(row: int, length: int) -> AdmittedRequest:
    params = SamplingParams(temperature=0.6, ignore_eos=True)
    token_ids = np.arange(length, dtype=np.int32) % 250
    return AdmittedRequest(row, str(row), token_ids, length, params, (), seed=row)


def model_names(is_dry: bool) -> list[str]:
    """The models that are measured."""
    return ["tiny"] if is_dry else ["Qwen3-0.6B", "Qwen3-14B"]


def measure_model(name: str, platform: Any, folder: Path, until: float) -> Iterator[dict[str, Any]]:
    """Rows of one model, as they come."""
    rates = Rates(copy_rate(platform), matmul_rate(platform))
    yield from ModelBench(name, write_config(folder, MODELS[name]), platform, rates).rows(until)


def measure_transformers(name: str, platform: Any, folder: Path, until: float) -> Iterator[dict[str, Any]]:
    """The recipe by transformers. Where it cannot do it the comparison is left out, and the row says why."""
    try:
        write_config(folder, MODELS[name])
        yield measure(name, folder, platform, recipe(MODELS[name]["vocab_size"], False), until)
    except Exception as error:
        yield {"model": name, "what": "transformers", "skipped": f"{type(error).__name__}: {error}"}
