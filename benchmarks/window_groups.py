"""Measure window groups: Gemma 3 4B's shape, and a prompt of 32k through the real scheduler with a runner that runs
nothing.

    python benchmarks/window_groups.py

Pages and bytes are those that the engine itself decides on for the shape; the pages in use are counted while the
scheduler runs. No weights are made.
"""

from __future__ import annotations

import argparse

import numpy as np

from tokenmill.config.configs import EngineConfig
from tokenmill.core.plan import StepPlan, StepResult
from tokenmill.core.request import Request
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.sizes import size_text
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.page_pool import PagePool
from tokenmill.engine.kv.radix_tree import RadixTree
from tokenmill.engine.kv.window_pages import WindowPages, WindowSettings
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.resources.windows import Windows
from tokenmill.engine.scheduler.scheduler import Scheduler
from tokenmill.startup.sizing.kv_size import decide_kv_size
from tokenmill.startup.sizing.window_size import PageBytes, decide_grouped_size, pages_of_one

LAYERS, KV_HEADS, HEAD_DIM, WINDOW, PATTERN = 34, 4, 256, 1024, 6
FULL_LAYERS = LAYERS // PATTERN
LAYER_BYTES = 2 * KV_HEADS * HEAD_DIM * 2  # of a token, bfloat16
PAGE_SIZE, BUDGET, CONTEXT, OUTPUT = 16, 512, 32 * 1024, 256
PAGE = PageBytes(PAGE_SIZE * FULL_LAYERS * LAYER_BYTES, PAGE_SIZE * (LAYERS - FULL_LAYERS) * LAYER_BYTES, window=WINDOW)
MIB, GIB = 1 << 20, 1 << 30


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(f"bytes of a token: {PAGE.both // PAGE_SIZE:,}, {PAGE.full // PAGE_SIZE:,} of these in the full layers")
    pages, windows = pages_of_one(config_of(), CONTEXT, WINDOW)
    taken = pages * PAGE.full + windows * PAGE.windowed
    print(f"a request of {CONTEXT:,}, whole: {pages:,} pages, {pages * PAGE.both / MIB:,.0f} MiB")
    print(f"  with a window group: {pages:,} pages and {windows:,} of the group, {taken / MIB:,.0f} MiB")
    print("\ngiven      whole    with a window group (tokens in full pages, pages of the group)")
    for given in (8 * GIB, 16 * GIB, 32 * GIB):
        config = config_of(kv_cache_memory_bytes=given)
        tokens = decide_kv_size(config, CONTEXT, PAGE.both, 0).num_pages * PAGE_SIZE
        parted = decide_grouped_size(config, CONTEXT, PAGE, 0)
        assert parted.window is not None
        of_groups = f"{parted.num_pages * PAGE_SIZE:12,} {parted.window.num_pages:10,}"
        print(f"{size_text(given):8} {tokens:8,} {of_groups}")
    run(pages, windows)


def config_of(**flags: int) -> EngineConfig:
    """A config for requests of `CONTEXT` tokens on a CPU."""
    return EngineConfig(device="cpu", max_model_len=CONTEXT, max_num_batched_tokens=BUDGET, **flags).resolve()


def run(num_pages: int, num_windows: int) -> None:
    """A prompt and its output; window pages in use, least for one such request in all."""
    windows = WindowPages(WindowSettings(WINDOW, num_windows), PAGE_SIZE, num_pages + 1, BUDGET)
    kv = KVManager(PagePool(num_pages + 1), RadixTree(PAGE_SIZE), PAGE_SIZE)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=BUDGET), kv, [Windows(kv, windows)])
    prompt = np.random.default_rng(0).integers(0, 200_000, CONTEXT - OUTPUT, dtype=np.int32)
    scheduler.add(
        Request("0", prompt, SamplingParams(max_tokens=OUTPUT), arrival=0, max_tokens_total=CONTEXT),
    )
    print("\n tokens computed   full pages in use   window pages in use, evictable, free")
    computed = 0
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(outcome(plan))
        computed += plan.num_tokens
        if computed in (512, 1024, 2048, 4096, 16384, len(prompt), CONTEXT - 2):
            counts = f"{windows.num_pinned:8d}, {windows.num_evictable:6d}, {windows.pool.num_free:6d}"
            print(f"{computed:16,} {kv.num_pinned:16,}     {counts}")
        scheduler.check_invariants()
    print(f"afterwards       {kv.num_pinned:16,}     {windows.num_pinned:8d}, {windows.num_evictable:6d}")


def outcome(plan: StepPlan) -> StepResult:
    """Some token for every request that samples."""
    starts = np.concatenate([[0], np.cumsum(plan.num_samples)]).astype(np.int32)
    return StepResult(plan.step, np.full(starts[-1], 7, dtype=np.int32), starts)


if __name__ == "__main__":
    main()
