"""Measure what each change to a decode step gains, in turns: Qwen3-0.6B's shape in random weights.

    python -m tools.gpu.compare_decodes [--device cpu] [--seconds 95]

Graphs of 1, 8, 64 and 256 requests at a context of 1,024, captured anew with one change after the other, replayed in
turns: a table of milliseconds a step, and how far the logits are from those of the first; then the kernels of the first
and the last. A check last: greedy tokens of a small model in float32, its norms and sums in its products, its contexts
split and shared, against the CPU's reference. A row each as it comes, one line of JSON last.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tools.gpu.benchmarks import decode_plans
from tools.gpu.engines import built, generate, running
from tools.gpu.folders import QWEN3_0_6B, SMALL, TINY, write_checkpoint, write_config
from tools.gpu.kernel_times import Call, Row, profiled
from tools.gpu.machine import device_seconds, make_platform
from tools.gpu.profile_step import runner_of, stream_of
from tools.gpu.rows import Rows, guarded, parse

from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.runner import cuda_graphs
from tokenmill.engine.runner.cuda_graphs import DecodeGraphs

# In the order in which they come on top of each other.
CHANGES = (
    "before",
    "lists in one kernel",
    "attention begins early",
    "parts joined in place",
    "norms and sums in products",
    "heads placed in products",
)
BATCHES, CONTEXT, TURNS = (1, 8, 64, 256), 1024, 3
PROFILED, MOST_KERNELS = (1, 64, 256), 12


def main(argv: Sequence[str] | None = None) -> int:
    """Measure until it is done or the time is up."""
    options = parse(__doc__ or "", argv, 95)
    platform = make_platform(options.device)
    with tempfile.TemporaryDirectory() as folder, Rows(options.seconds) as rows:
        rows.take(guarded("decodes", measure(platform, Path(folder) / "whole")))
        rows.take(guarded("oracle", check(platform, Path(folder) / "small")))
    return int(rows.has_failed)


def check(platform: Any, folder: Path) -> Iterator[Row]:
    """Greedy tokens of the whole engine against the CPU's."""
    is_dry, start = platform.name != "cuda", time.monotonic()
    write_checkpoint(folder, {**(TINY if is_dry else SMALL["qwen3"]), "max_position_embeddings": 2048}, 3)
    generator = random.Random(5)
    common = [generator.randrange(1, 250) for _ in range(20 if is_dry else 600)]
    # Of one, of several and of the same splits; more than there are few rows of.
    lengths = (3,) if is_dry else (1, 40, 255, 257, 512, 700, 900, *range(3, 20))
    prompts = [[generator.randrange(1, 250) for _ in range(length)] for length in lengths]
    prompts += [[*common, number + 1] for number in range(1 if is_dry else 10)]
    limits: dict[str, Any] = {"max_num_seqs": 2 if is_dry else 34, "max_num_batched_tokens": 64 if is_dry else 512}
    limits |= {"max_model_len": 512 if is_dry else 1024, "page_size": 16, "num_pages": 80 if is_dry else 900}
    limits |= {"dtype": "float32"}
    params = [SamplingParams(temperature=0.0, max_tokens=2 if is_dry else 24, ignore_eos=True) for _ in prompts]
    with running(folder, None, **limits) as engine:
        want = generate(engine, prompts, params)
    with ExitStack() as stack:
        stack.enter_context(fused_float32())
        with running(folder, platform, **limits, attention_backend="triton") as engine:
            got = generate(engine, prompts, params)
    differ = [number for number, (one, other) in enumerate(zip(got, want, strict=True)) if one != other]
    detail = f"{len(differ)} of {len(prompts)} differ, {differ[:5]}; {time.monotonic() - start:.1f} s"
    yield {"check": "greedy tokens, float32, all changes", "passed": not differ, "detail": detail}


@contextmanager
def fused_float32() -> Iterator[None]:
    """Let products of few rows be of float32, too, whose exact products want small tiles."""

    from tokenmill.model.kernels.triton import few_heads, few_rows, kernels

    def suit(self: Any, x: torch.Tensor, weights: Any) -> bool:
        return bool(x.dtype == torch.float32 and len(x) <= few_rows.MOST_ROWS)

    with ExitStack() as stack:
        stack.enter_context(patch.object(kernels.FewRowsProducts, "suit", suit))
        for module in (few_rows, few_heads):
            stack.enter_context(patch.object(module, "tiling_for", lambda *shape: few_rows.Tiling(16, 16, 32, 4, 2)))
        yield


def measure(platform: Any, folder: Path) -> Iterator[Row]:
    """All variants of one engine's graphs."""
    is_dry = platform.name != "cuda"
    write_config(folder, TINY if is_dry else QWEN3_0_6B)
    batches, context = ((1,), 6) if is_dry else (BATCHES, CONTEXT)
    limits: dict[str, Any] = {"max_model_len": 300 if is_dry else context + 64, "load_format": "dummy"}
    limits |= {"max_num_seqs": max(batches), "max_num_batched_tokens": 512 if is_dry else 8192}
    limits |= {"num_pages": 32, "dtype": "float32"} if is_dry else {"dtype": "bfloat16", "gpu_memory_utilization": 0.8}
    with ExitStack() as stack:
        stack.enter_context(patch.object(cuda_graphs, "ladder", lambda most: list(batches)))
        parts = stack.enter_context(
            built(folder, platform, async_scheduling=True, attention_backend="triton", **limits)
        )
        engine = parts.engine
        runner, page_size = runner_of(engine), engine.scheduler.kv.page_size
        for tensor in runner._attention.kv.tensors:
            tensor.normal_()
        for plan in decode_plans(max(batches), context, -(-(context + 3) // page_size), 3):
            engine.executor.launch(plan).result()
        assert runner.graphs is not None, "decodes are captured"
        with torch.inference_mode():
            yield from _compare(runner, platform, batches)


def _compare(runner: Any, platform: Any, batches: Sequence[int]) -> Iterator[Row]:
    own = runner.graphs._graphs
    captured: dict[str, DecodeGraphs] = {}
    for number, name in enumerate(CHANGES):
        start = time.monotonic()
        with as_before(CHANGES[number + 1 :]):
            made = DecodeGraphs(platform, own._stream, own._work, own._padding, max(batches))
            made._inputs.copy_(own._inputs)
            made.capture()
        captured[name] = made
        yield {"captured": name, "seconds": time.monotonic() - start}
    times: dict[tuple[str, int], list[float]] = {}
    changed = dict.fromkeys(CHANGES, 0)
    logits: dict[tuple[str, int], torch.Tensor] = {}
    with stream_of(runner):
        for _ in range(TURNS):
            for batch in batches:
                for name, graphs in captured.items():
                    graph = graphs._graphs[batch, 1]
                    times.setdefault((name, batch), []).append(device_seconds(graph.replay, platform))
                    found = graph.outputs[0].float().clone()
                    changed[name] += int(not torch.equal(found, logits.setdefault((name, batch), found)))
    for name in captured:
        # Replays of one graph have the same inputs.
        row: Row = {"what": name, "unsteady": changed[name]}
        for batch in batches:
            row[f"ms_{batch}"] = round(1e3 * statistics.median(times[name, batch]), 4)
            first, found = logits[CHANGES[0], batch], logits[name, batch]
            row[f"off_{batch}"] = round(float((found - first).abs().max() / first.std()), 4)
            row[f"same_{batch}"] = float((found.argmax(1) == first.argmax(1)).float().mean())
        yield row
    with stream_of(runner):
        for batch in [batch for batch in batches if batch in PROFILED]:
            for name in (CHANGES[0], CHANGES[-1]):
                calls = profiled(captured[name]._graphs[batch, 1].replay, platform)
                yield {"kernels of": f"{name}, batch {batch}", **_longest(calls)}


def _longest(calls: Sequence[Call]) -> Row:
    """Microseconds and calls of the kernels that take longest together."""
    names: dict[str, list[float]] = {}
    for name, microseconds in calls:
        names.setdefault(name[:40], []).append(microseconds)
    longest = sorted(names.items(), key=lambda entry: -sum(entry[1]))[:MOST_KERNELS]
    return {"calls": len(calls), **{name: f"{sum(times):.0f}/{len(times)}" for name, times in longest}}


@contextmanager
def as_before(changes: Sequence[str]) -> Iterator[None]:
    """Undo changes."""
    from tokenmill.model.attention.backends import triton as backend
    from tokenmill.model.kernels.triton.splits import list_splits

    with ExitStack() as stack:
        for change in changes:
            _undo(stack, change)
        joins = "parts joined in place" not in changes
        lists = list_splits if "lists in one kernel" not in changes else _list_by_torch
        stack.enter_context(patch.object(backend, "list_splits", partial(_listed, lists, joins)))
        yield


def _undo(stack: ExitStack, change: str) -> None:
    from tokenmill.model.kernels.triton import attention, kernels

    if change == "norms and sums in products":
        stack.enter_context(patch.object(kernels.FewRowsProducts, "suit", lambda *given: False))
    elif change == "heads placed in products":
        stack.enter_context(patch.object(kernels, "few_heads", _heads_behind))
    elif change == "attention begins early":
        stack.enter_context(patch.object(attention, "dependent", lambda q: {"PDL": False}))


def _heads_behind(x: Any, weight: Any, bias: Any, scales: Any, norm: Any, heads: Any, counters: Any) -> Any:
    """Place heads by a kernel behind the product."""
    from tokenmill.model.kernels.triton.few_rows import few_rows
    from tokenmill.model.kernels.triton.heads import place_heads

    return place_heads(few_rows(x, weight, bias, None, scales, norm=norm), heads)


def _listed(lists: Any, joins: bool, *given: Any) -> Any:
    return lists(*given[:-1], joins)


def _list_by_torch(
    context_lens: torch.Tensor,
    longest: np.ndarray,
    heads: tuple[int, int, int],
    num_units: int,
    tokens: int = 1,
    pages: tuple[torch.Tensor, int] | None = None,
    joins: bool = False,
) -> Any:
    """List splits as `list_splits` did before, by some twenty launches of torch."""
    from tokenmill.model.kernels.triton import splits as own_splits
    from tokenmill.model.kernels.triton.splits import DECODE_ROWS, PROMPT_ROWS, SPLIT_ENDS, SPLIT_KEYS

    if longest.max() <= SPLIT_KEYS or tokens * (heads[0] // heads[1]) > PROMPT_ROWS:
        return None
    # A copy is not allowed in a capture; the run that warms it up comes first.
    if str(context_lens.device) not in ENDS:
        ENDS[str(context_lens.device)] = torch.from_numpy(SPLIT_ENDS).to(context_lens.device)
    ends = ENDS[str(context_lens.device)]
    most = int(np.searchsorted(SPLIT_ENDS, longest).sum()) + len(longest)
    counts = torch.searchsorted(ends, context_lens, out_int32=True) + 1
    stops = counts.cumsum(0, dtype=torch.int32)
    numbers = torch.arange(most, dtype=torch.int32, device=stops.device)
    items = torch.searchsorted(stops, numbers, right=True, out_int32=True)
    shares, together = None, DECODE_ROWS // (heads[0] // heads[1])
    if pages is not None and tokens == 1 and together > 1 and len(longest) > 1:
        order, shared = _shared(context_lens, pages, ends, together)
        own = (counts[order] - shared).cumsum(0, dtype=torch.int32)
        shares = own_splits.Shares(torch.searchsorted(own, numbers, right=True, out_int32=True), own, order, shared)
    parts = torch.empty(
        most, tokens, heads[0], heads[2] + own_splits.PART_EXTRA, dtype=torch.float32, device=stops.device
    )
    per_unit = own_splits.PROGRAMS_PER_UNIT - (tokens * (heads[0] // heads[1]) > DECODE_ROWS)
    return own_splits.Splits(min(most * heads[1], per_unit * num_units), items, stops, parts, shares)


def _shared(
    context_lens: torch.Tensor, pages: tuple[torch.Tensor, int], ends: torch.Tensor, together: int
) -> tuple[torch.Tensor, torch.Tensor]:
    table, page_size = pages
    order = table[:, 0].argsort(stable=True)
    table, lens = table[order], context_lens[order]
    differ = table[1:] != table[:-1]
    same = torch.where(differ.any(1), differ.to(torch.uint8).argmax(1), table.shape[1])
    keys = torch.minimum(same * page_size, torch.minimum(lens[1:], lens[:-1]) - 1)
    shared = torch.zeros_like(context_lens)
    shared[1:] = torch.searchsorted(ends, keys.to(torch.int32), right=True, out_int32=True)
    shared[::together] = 0
    return order.int(), shared


ENDS: dict[str, torch.Tensor] = {}


if __name__ == "__main__":
    sys.exit(main())
