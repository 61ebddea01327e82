"""Run every adapter the same way: load, warm up, measure each point, write the outcome.

Runs in the engines' own environments, so it needs nothing but the standard library.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

# Ordinary tokens in every vocabulary.
HIGHEST_TOKEN_ID = 1000
FIRST_PROMPT_LEN = 8

# Called after each step with the number of tokens that each request has so far.
OnStep = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class Point:
    """A batch to measure: requests at once, prompt tokens and output tokens of each."""

    name: str
    batch_size: int
    input_len: int
    output_len: int
    repeats: int = 1

    @property
    def context_len(self) -> int:
        """Tokens that a request has in the end."""
        return self.input_len + self.output_len


@dataclass(frozen=True, slots=True)
class Texts:
    """Chunks of a text, and which of their logits are wanted.

    Attributes:
        chunks: token ids, all of one length.
        first, last: positions of each chunk, the last excluded.
        logits: file for them, float32 [chunks * positions, vocabulary].
    """

    chunks: list[list[int]]
    first: int
    last: int
    logits: str


@dataclass(frozen=True, slots=True)
class Setup:
    """The task of an adapter.

    Attributes:
        spawned: when its process was started, on the monotonic clock that all processes of a machine share.
        kv_bytes: memory for KV, for engines that take it up front.
        texts: the task of a model that is judged, not timed; None: it is timed.
    """

    model: str
    weights: str
    threads: int
    kv_bytes: int
    seed: int
    spawned: float
    points: tuple[Point, ...]
    outcome: str
    texts: Texts | None = None

    @property
    def max_batch_size(self) -> int:
        """Most requests at once."""
        return max((point.batch_size for point in self.points), default=1)

    @property
    def max_context_len(self) -> int:
        """Most tokens of a request."""
        return max(point.context_len for point in self.points)

    @staticmethod
    def read(path: str) -> Setup:
        """From the file that `write` wrote."""
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        texts = None if fields["texts"] is None else Texts(**fields["texts"])
        return Setup(**{**fields, "points": tuple(Point(**point) for point in fields["points"]), "texts": texts})

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


class Adapter(Protocol):
    """An engine, loaded. Greedy sampling; no request ends before its length; nothing is found in a prefix cache."""

    packages: tuple[str, ...]

    def __init__(self, setup: Setup) -> None:
        """Load the model."""

    def prepare(self, batch_size: int, context_len: int) -> None:
        """Make room for a batch; not part of what is timed."""

    def generate(self, prompts: list[list[int]], num_tokens: int, on_step: OnStep) -> None:
        """Continue each prompt by `num_tokens` tokens, as one batch."""

    def logits(self, chunk: list[int]) -> Any:
        """Return the logits, or log probabilities, of all positions but perhaps the last as a float32 array."""

    def weight_bytes(self) -> int:
        """Return the memory of the weights."""


def main(adapter_class: type[Adapter]) -> None:
    """Measure what the setup file (the first argument) asks for and write the outcome where it says."""
    setup = Setup.read(sys.argv[1])
    source = random.Random(setup.seed)
    adapter = adapter_class(setup)
    if setup.texts is not None:
        judge(adapter, setup.texts)
        Path(setup.outcome).write_text(json.dumps({"bytes": adapter.weight_bytes()}), encoding="utf-8")
        return
    loaded = time.monotonic() - setup.spawned
    first = Point("first token", 1, FIRST_PROMPT_LEN, 1)
    _run(adapter, first, source)
    outcome: dict[str, Any] = {
        "load_seconds": loaded,
        "first_token_seconds": time.monotonic() - setup.spawned,
        "versions": {name: importlib.metadata.version(name) for name in adapter.packages},
    }
    # Kernels are chosen and buffers grow in the first steps.
    _run(adapter, Point("warm-up", min(4, setup.max_batch_size), 64, 4), source)
    outcome["points"] = {point.name: measure(adapter, point, source) for point in setup.points}
    Path(setup.outcome).write_text(json.dumps(outcome), encoding="utf-8")


def judge(adapter: Adapter, texts: Texts) -> None:
    """Write the logits that are wanted, one chunk behind the other."""
    with open(texts.logits, "wb") as file:
        for chunk in texts.chunks:
            adapter.prepare(1, len(chunk))
            adapter.logits(chunk)[texts.first : texts.last].tofile(file)


def measure(adapter: Adapter, point: Point, source: random.Random) -> dict[str, float | None]:
    """Medians of the point's repeats.

    Prefill ends when every request has its first token; decode is what comes after that.
    """
    runs = [_run(adapter, point, source) for _ in range(point.repeats)]
    found = {name: [run[name] for run in runs] for name in runs[0]}
    return {
        name: None if None in all_ else statistics.median(rate or 0.0 for rate in all_) for name, all_ in found.items()
    }


def _run(adapter: Adapter, point: Point, source: random.Random) -> dict[str, float | None]:
    prompts = [[source.randint(0, HIGHEST_TOKEN_ID) for _ in range(point.input_len)] for _ in range(point.batch_size)]
    adapter.prepare(point.batch_size, point.context_len)
    steps: list[tuple[tuple[float, float], int, int]] = []
    start, cpu_start = time.perf_counter(), time.process_time()

    def note(counts: Sequence[int]) -> None:
        times = time.perf_counter() - start, time.process_time() - cpu_start
        steps.append((times, min(counts), sum(counts)))

    adapter.generate(prompts, point.output_len, note)
    expected = point.batch_size * point.output_len
    if not steps or steps[-1][2] != expected:
        raise RuntimeError(f"{point.name}: {steps[-1:]} is not the end of {expected} tokens")
    first = next(step for step in steps if step[1] > 0)
    tokens = expected - first[2]
    rates: dict[str, float | None] = {}
    for unit, begun, ended in zip(("second", "cpu_second"), first[0], steps[-1][0], strict=True):
        rates[f"prefill_tokens_per_{unit}"] = point.batch_size * point.input_len / begun
        rates[f"decode_tokens_per_{unit}"] = tokens / (ended - begun) if tokens else None
    return rates
