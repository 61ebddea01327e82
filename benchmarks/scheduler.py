"""Time the scheduler, without a model: schedule + commit of running decodes, and the admission of many requests.

    python benchmarks/scheduler.py [--rows 256] [--steps 400]

Prints a table and, as the last line, one JSON document. Times are microseconds on one core, each by two clocks: the
wall's, and the processor's, which stands still while other processes have the core. torch is never imported.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator

import numpy as np

from tokenmill.core.plan import StepPlan, StepResult
from tokenmill.core.request import Request
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.page_pool import PagePool
from tokenmill.engine.kv.radix_tree import RadixTree
from tokenmill.engine.kv.window_pages import WindowSettings, most_window_pages, num_pages_ahead
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.scheduler import Scheduler
from tokenmill.engine.scheduler.standard import standard_resources

Seconds = tuple[float, float]

PAGE_SIZE = 16
POOL_PAGES = 100_000


def main() -> None:
    """Measure everything and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="running requests")
    parser.add_argument("--waiting", type=int, default=1000, help="requests that wait meanwhile")
    parser.add_argument("--steps", type=int, default=400, help="steps measured at each context length")
    parser.add_argument("--window", type=int, default=0, help="tokens of a window group; 0: there is none")
    arguments = parser.parse_args()

    report: dict[str, object] = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    report["window"] = arguments.window
    report |= {
        "rows": arguments.rows,
        "waiting": arguments.waiting,
        "steps": arguments.steps,
    }
    for context in (1024, 32 * 1024, 128 * 1024):
        report[f"decode_us_context_{context}"] = show(
            f"schedule + commit, context {context}", list(decode_steps(context, arguments))
        )
    report["admission_us_per_request"] = show("admission of one of 10,000", list(admissions(10_000)))
    report["match_us_32k_cached"] = show("match of a cached 32k prompt", list(matches(32 * 1024)))
    assert "torch" not in sys.modules, "the scheduler must not import torch"
    print(json.dumps(report))


def show(name: str, seconds: list[Seconds]) -> dict[str, float]:
    """Print a row of the table; returns its figures in microseconds."""
    figures = (np.percentile(seconds, [50, 99], axis=0) * 1e6).round(1)
    (p50, cpu_p50), (p99, cpu_p99) = figures.tolist()
    print(f"{name:35s} p50 {p50:8.1f}  p99 {p99:8.1f}   processor: p50 {cpu_p50:8.1f}  p99 {cpu_p99:8.1f}")
    return {"p50": p50, "p99": p99, "cpu_p50": cpu_p50, "cpu_p99": cpu_p99}


def now() -> Seconds:
    """Wall clock and processor clock."""
    return time.perf_counter(), time.thread_time()


def since(start: Seconds, parts: int = 1) -> Seconds:
    """Return the time on both clocks, for each of `parts`."""
    wall, cpu = now()
    return (wall - start[0]) / parts, (cpu - start[1]) / parts


def make_scheduler(rows: int, num_pages: int, budget: int, window: int = 0) -> Scheduler:
    """A scheduler over a pool of `num_pages`; each request is a tenant of its own, as calls without keys are."""
    settings = None
    if window:
        count = rows * most_window_pages(window, PAGE_SIZE) + num_pages_ahead(budget, PAGE_SIZE)
        settings = WindowSettings(window, count)
    config = SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=budget)
    kv = KVManager(PagePool(num_pages + 1), RadixTree(PAGE_SIZE), PAGE_SIZE)
    return Scheduler(config, kv, standard_resources(config, kv, settings))


def request(number: int, prompt: np.ndarray, max_tokens: int) -> Request:
    """A request whose first token makes its prompt unlike all others."""
    prompt = prompt.copy()
    prompt[0] = number
    params = SamplingParams(max_tokens=max_tokens)
    total = len(prompt) + max_tokens
    return Request(str(number), prompt, params, arrival=number, max_tokens_total=total, tenant=str(number))


def outcome(plan: StepPlan) -> StepResult:
    """Some token for every request that samples."""
    starts = np.concatenate([[0], np.cumsum(plan.num_samples)]).astype(np.int32)
    return StepResult(plan.step, np.full(starts[-1], plan.step % 1000, dtype=np.int32), starts)


def decode_steps(context: int, arguments: argparse.Namespace) -> Iterator[Seconds]:
    """Seconds of each step in which `rows` requests of `context` tokens decode, with others waiting for a row."""
    pages = (context // PAGE_SIZE + arguments.steps // PAGE_SIZE + 4) * (arguments.rows + 1)
    budget = (context + 1) * arguments.rows
    scheduler = make_scheduler(arguments.rows, max(pages, POOL_PAGES), budget, arguments.window)
    prompt = np.arange(context, dtype=np.int32)
    for number in range(arguments.rows + arguments.waiting):
        scheduler.add(request(number, prompt if number < arguments.rows else prompt[:64], arguments.steps + 100))
    for _ in range(10):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(outcome(plan))
    for _ in range(arguments.steps):
        start = now()
        plan = scheduler.schedule()
        to_schedule = since(start)
        assert plan is not None
        result = outcome(plan)
        start = now()
        scheduler.commit(result)
        to_commit = since(start)
        yield to_schedule[0] + to_commit[0], to_schedule[1] + to_commit[1]
        assert len(plan.rows) == arguments.rows


def admissions(count: int) -> Iterator[Seconds]:
    """Seconds per request from arrival to its first plan, each step admitting as many as its budget holds."""
    scheduler = make_scheduler(count, POOL_PAGES, budget=8192)
    prompt = np.arange(128, dtype=np.int32)
    requests = [request(number, prompt, 1) for number in range(count)]
    start = now()
    for one in requests:
        scheduler.add(one)
    yield since(start, count)
    while len(scheduler.state.waiting):
        start = now()
        plan = scheduler.schedule()
        assert plan is not None
        yield since(start, len(plan.new_rows))
        scheduler.commit(outcome(plan))


def matches(length: int) -> Iterator[Seconds]:
    """Seconds to match a prompt whose every page is cached."""
    tree = RadixTree(PAGE_SIZE)
    tokens = np.random.default_rng(0).integers(0, 150_000, length, dtype=np.int32)
    root = tree.match("", tokens, 0).node
    tree.lock(root)
    tree.extend(root, tokens, np.arange(1, length // PAGE_SIZE + 1, dtype=np.int32))
    for step in range(200):
        start = now()
        match = tree.match("", tokens, step)
        yield since(start)
        assert match.num_tokens == length


if __name__ == "__main__":
    main()
