"""Measure what a watched engine pays, without a model: a report of its iterations, by the processor's clock.

    python benchmarks/live_report.py [--rows 256] [--waiting 1000] [--steps-per-second 100]

Requests and tree are asked for as the hub asks for them. Printed are milliseconds per report, and the share of one core
that four reports a second are.
"""

from __future__ import annotations

import argparse
import time

import msgspec
import numpy as np

from tokenmill.core.live import ShowTurns
from tokenmill.core.messages import AddRequest
from tokenmill.core.plan import StepOutcome, StepPlan, StepResult
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.page_pool import PagePool
from tokenmill.engine.kv.radix_tree import RadixTree
from tokenmill.engine.loop.engine import Engine, ModelLimits
from tokenmill.engine.loop.live_report import live_report
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.scheduler import Scheduler
from tokenmill.serving.server.live_hub import INTERVAL, REQUESTS_EVERY, TREE_EVERY

PAGE_SIZE = 16
PROMPT = 64


class NoModel:
    """An executor whose steps bring token 1 at once."""

    def launch(self, plan: StepPlan) -> StepOutcome:
        """See `Executor`."""
        starts = np.concatenate([[0], np.cumsum(plan.num_samples)]).astype(np.int32)
        result = StepResult(plan.step, np.ones(starts[-1], np.int32), starts)
        return StepOutcome(lambda: result)

    def recover(self) -> None:
        """See `Executor`."""

    def close(self) -> None:
        """See `Executor`."""


def make_engine(rows: int, waiting: int) -> Engine:
    """So many requests run, and so many wait; each shares half of its prompt with a few others."""
    pool = PagePool(rows * 4096 // PAGE_SIZE + 1)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=8192),
        KVManager(pool, RadixTree(PAGE_SIZE), PAGE_SIZE),
    )
    engine = Engine(scheduler, NoModel(), ModelLimits(4096, 1000, frozenset()))
    for number in range(rows + waiting):
        prompt = [number % 16] * (PROMPT // 2) + [16 + number] * (PROMPT // 2)
        engine.add(AddRequest(id=f"{number:024x}", prompt_token_ids=prompt, params=SamplingParams(max_tokens=4000)))
    while len(scheduler.state.running) < rows:
        engine.step()
    return engine


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--steps-per-second", type=int, default=100)
    parser.add_argument("--reports", type=int, default=64)
    given = parser.parse_args()
    engine, since, spent, sizes = make_engine(given.rows, given.waiting), 0, [], []
    for number in range(given.reports):
        for _ in range(round(given.steps_per_second * INTERVAL)):
            engine.step()
        began = time.thread_time()
        asked = ShowTurns("x", since, number % REQUESTS_EVERY == 0, number % TREE_EVERY == 0)
        report = live_report(asked, engine.iterations(), engine.scheduler, engine.lifetimes)
        sizes.append(len(msgspec.msgpack.encode(report)))
        spent.append(time.thread_time() - began)
        since = report.num_turns
    spent = spent[1:]  # the first brings all that was kept
    mean = sum(spent) / len(spent)
    print(f"{given.rows} running, {given.waiting} waiting, {given.steps_per_second} steps a second:")
    print(f"a report: mean {1e3 * mean:.2f} ms, most {1e3 * max(spent):.2f} ms, {sum(sizes) / len(sizes) / 1e3:.1f} kB")
    print(f"four a second: {100 * mean / INTERVAL:.2f}% of a core")


if __name__ == "__main__":
    main()
