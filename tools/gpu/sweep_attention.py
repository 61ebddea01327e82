"""The attention kernel over its launch parameters, on the heads of Qwen3-0.6B: what reaches most, best first.

    python -m tools.gpu.sweep_attention [--device cpu] [--seconds 150]

Decodes at two batch sizes, and one prompt: pipeline stages, keys of a tile, warps, page sizes, rows of a prompt's tile,
and whether neighbouring programs take the heads of one piece of work or one head of several; the splits of contexts are
the engine's. Cases that differ in least from what the engine launches come first, so that a
deadline cuts the rest; processes beside this one compile them first, and leave them in triton's cache. Every case is
compared with the engine's own launch. A row each as it comes, then the best, one line of JSON last.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tools.gpu.machine import device_seconds, make_platform
from tools.gpu.rows import Row, Rows, guarded, parse

from tokenmill.model.attention.batch import DeviceLens
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec

if TYPE_CHECKING:
    from tokenmill.model.attention.paged import Requests

NUM_BEST = 5
PAGE_SIZE, LARGEST_PAGE = 16, 256
# Processes that compile, and the share of the time that they may take.
MOST_PROCESSES, COMPILING = 12, 0.5
# Of outputs that are means of normal numbers, in half precision.
LARGEST_DIFFERENCE = 0.02


@dataclass(frozen=True, slots=True)
class Case:
    """The parameters of a launch."""

    num_stages: int
    tile_keys: int
    warps: int
    page_size: int
    rows: int
    heads_first: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of requests with one new token each (decodes), or with all of their tokens (prompts)."""

    name: str
    batch: int
    context: int
    is_prompt: bool
    num_heads: int = 16
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def query_len(self) -> int:
        """New tokens of a request."""
        return self.context if self.is_prompt else 1

    def rates(self, seconds: float) -> Row:
        """Bytes of keys and values, and operations, per second."""
        num_bytes = 2 * 2 * self.batch * self.context * self.num_kv_heads * self.head_dim
        seen = self.context * self.context / 2 if self.is_prompt else self.context
        operations = 4 * self.batch * seen * self.num_heads * self.head_dim
        return {"gb_per_s": num_bytes / seconds / 1e9, "tflops": operations / seconds / 1e12}


# Near to what the engine launches, in half precision; the engine's own launch is measured before all of them.
DECODE, PROMPT = Case(3, 64, 4, 16, 16, True), Case(3, 64, 8, 16, 128, True)
DECODE_CHOICES = ((2, 3, 4), (32, 64, 128), (2, 4, 8), (16, 64, 256), (16,), (True, False))
PROMPT_CHOICES = ((2, 3, 4), (32, 64, 128), (4, 8), (16, 256), (64, 128), (True, False))
SHAPES = (
    Shape("decode, batch 64, context 1024", 64, 1024, False),
    Shape("decode, batch 256, context 1024", 256, 1024, False),
    Shape("prompt of 8192 tokens", 1, 8192, True),
)
TINY: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
DRY_SHAPES = (Shape("decode, tiny", 2, 70, False, **TINY), Shape("prompt, tiny", 1, 20, True, **TINY))
DRY_CHOICES = {
    False: ((3,), (64,), (4,), (16,), (16,), (True, False)),
    True: ((3,), (64,), (8,), (16,), (128,), (True, False)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Sweep until it is done or the time is up."""
    options = parse(__doc__ or "", argv, 150)
    platform = make_platform(options.device)
    is_dry = platform.name != "cuda"
    shapes = DRY_SHAPES if is_dry else SHAPES
    with Rows(options.seconds) as rows:
        rows.take(compiled_ahead(shapes, is_dry, time.monotonic() + options.seconds * COMPILING))
        for place, shape in enumerate(shapes):
            until = time.monotonic() + rows.seconds_left / (len(shapes) - place)
            found = rows.take(sweep(shape, platform, is_dry, until))
            best = sorted((row for row in found if "us" in row), key=lambda row: row["us"])[:NUM_BEST]
            rows.take({"rank": rank, **row} for rank, row in enumerate(best, 1))
    return int(rows.has_failed)


def choices_for(shape: Shape, is_dry: bool) -> list[Case]:
    """The cases of a shape."""
    first = PROMPT if shape.is_prompt else DECODE
    choices = PROMPT_CHOICES if shape.is_prompt else DECODE_CHOICES
    return cases(first, DRY_CHOICES[shape.is_prompt] if is_dry else choices)


def compiled_ahead(shapes: Sequence[Shape], is_dry: bool, until: float) -> Iterator[Row]:
    """Compile the cases by running each once on a small shape, many at a time; says how many there was time for."""
    small = {shape.is_prompt: replace(shape, batch=1, context=32 if is_dry else LARGEST_PAGE) for shape in shapes}
    waiting = [
        (place, shape, case) for shape in small.values() for place, case in enumerate(choices_for(shape, is_dry))
    ]
    waiting.sort(key=lambda job: job[0])
    width = min(MOST_PROCESSES, os.cpu_count() or 1)
    device = "cpu" if is_dry else "cuda"
    pool: Executor = ThreadPoolExecutor(1) if is_dry else ProcessPoolExecutor(width, get_context("spawn"))
    futures = [pool.submit(run_once, shape, case, device) for _, shape, case in waiting]
    done, _ = wait(futures, max(0.0, until - time.monotonic()))
    pool.shutdown(wait=False, cancel_futures=True)
    failed = sum(1 for future in done if not future.cancelled() and future.exception() is not None)
    yield {"what": "compiled ahead", "cases": len(futures), "done": len(done), "of_them_failed": failed}


def run_once(shape: Shape, case: Case, device: str) -> None:
    """A case on a shape, in a process that has nothing else to do."""
    list(AttentionBench(shape, device).rows(case, make_platform(device)))


def sweep(shape: Shape, platform: Any, is_dry: bool, until: float) -> Iterator[Row]:
    """A row for each case of a shape, the engine's own launch first.

    Args:
        until: by `time.monotonic`, when no further case begins.
    """
    bench = AttentionBench(shape, platform.device)
    for case in (None, *choices_for(shape, is_dry)):
        if time.monotonic() < until:
            yield from guarded(f"{shape.name}, {case}", bench.rows(case, platform))


def cases(first: Case, choices: Sequence[Sequence[int]]) -> list[Case]:
    """All combinations; those that differ least from the first come first."""
    own = astuple(first)
    every = [one for one in product(*choices) if one != own]
    every.sort(key=lambda one: sum(a != b for a, b in zip(one, own, strict=True)))
    return [first, *(Case(*one) for one in every)]


class AttentionBench:
    """One shape with random numbers: the same keys and values whatever the page size."""

    def __init__(self, shape: Shape, device: str) -> None:
        self._shape = shape
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        length = -(-shape.context // LARGEST_PAGE) * LARGEST_PAGE
        self._kv = torch.randn(2, shape.batch * length, shape.num_kv_heads, shape.head_dim, device=device, dtype=dtype)
        tokens = shape.batch * shape.query_len
        self._q = torch.randn(tokens, shape.num_heads, shape.head_dim, device=device, dtype=dtype)
        self._length = length
        self._wanted: torch.Tensor | None = None

    def rows(self, case: Case | None, platform: Any) -> Iterator[Row]:
        """The time of a case (None: of the engine's own launch), and how far its result is from the first one's."""
        memory, requests = self._paged(case.page_size if case else PAGE_SIZE)
        output = torch.empty_like(self._q)
        implementation = implementation_of(self._shape, platform)
        plan, layer = implementation.plan(requests), AttentionLayer(0, self._shape.head_dim**-0.5)
        with overriding(case):
            work = partial(implementation.attend, self._q, memory, output, plan, layer)
            seconds = device_seconds(work, platform)
        if self._wanted is None:
            self._wanted = output.clone()
        difference = float((output - self._wanted).abs().max())
        row: Row = {"what": self._shape.name, "us": 1e6 * seconds, **self._shape.rates(seconds)}
        row |= asdict(case) if case else {"case": "the engine's own"}
        yield row | {"difference": difference, "passed": difference < LARGEST_DIFFERENCE}

    def _paged(self, page_size: int) -> tuple[tuple[torch.Tensor, torch.Tensor], Requests]:
        from tokenmill.model.attention.paged import Requests

        shape, device = self._shape, self._q.device
        pages = self._kv.view(2, -1, page_size, *self._kv.shape[2:])
        # Page 0 is nobody's; the others are in no order, as after hours of serving.
        places = torch.randperm(pages.shape[1], device=device)
        memory = pages.new_zeros(2, pages.shape[1] + 1, *pages.shape[2:])
        memory[:, places + 1] = pages
        lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
        starts = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * shape.query_len
        table = (places + 1).to(torch.int32).view(shape.batch, self._length // page_size)
        query_lens = np.full(shape.batch, shape.query_len, dtype=np.int32)
        context_lens = np.full(shape.batch, shape.context, dtype=np.int32)
        every = slice(0, len(self._q))
        return (memory[0], memory[1]), Requests(every, table, DeviceLens(lens, starts), query_lens, context_lens)


def implementation_of(shape: Shape, platform: Any) -> Any:
    """The engine's attention to decodes, or to prompts."""
    from tokenmill.model.attention.backends.triton import TritonDecodes, TritonPrompts

    spec = AttentionSpec(1, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    return TritonPrompts() if shape.is_prompt else TritonDecodes(spec, platform.num_units())


@contextmanager
def overriding(case: Case | None) -> Iterator[None]:
    """Launch the attention kernel by a case's parameters; what else it takes is the engine's to choose."""
    from tokenmill.model.kernels.triton import attention

    kernel, rows = attention._attend, attention.PROMPT_ROWS
    if case is not None:
        options = {"TILE": case.tile_keys, "HEADS_FIRST": case.heads_first}
        options |= {"num_warps": case.warps, "num_stages": case.num_stages}
        attention._attend, attention.PROMPT_ROWS = Overridden(kernel, options), case.rows
    try:
        yield
    finally:
        attention._attend, attention.PROMPT_ROWS = kernel, rows


class Overridden:
    """A kernel some of whose keyword arguments are not the caller's."""

    def __init__(self, kernel: Any, options: dict[str, int]) -> None:
        self._kernel = kernel
        self._options = options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **own: self._kernel[grid](*args, **{**own, **self._options})


if __name__ == "__main__":
    sys.exit(main())
