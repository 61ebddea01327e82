"""Costs of steps are measured on the engine itself, within its limits, and leave nothing behind."""

from __future__ import annotations

import pytest

from tokenmill.engine.loop.engine import Engine, ModelLimits
from tokenmill.engine.loop.step_log import LogHeader
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.drafter import Drafter
from tokenmill.lab.conformance.memory_runner import VOCAB_SIZE, PagedMemoryRunner
from tokenmill.startup.assembly.step_costs import SIZES, measure_step_costs


@pytest.mark.parametrize(
    ("budget", "max_model_len", "expected"),
    [(64, 100, SIZES), (12, 100, (1, 2, 3, 5, 9)), (64, 12, (1, 2, 3, 5, 9)), (1, 100, ()), (64, 4, ())],
)
def test_sizes_keep_to_the_limits(budget: int, max_model_len: int, expected: tuple[int, ...]) -> None:
    num_pages, page_size = 20, 8
    header = LogHeader(
        scheduler=SchedulerConfig(1, budget, 0, True, "fcfs", "mixed", "whole-prompt"),
        num_pages=num_pages,
        page_size=page_size,
        enable_prefix_caching=True,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[],
        depth=1,
    )
    runner = PagedMemoryRunner(1, num_pages, page_size, max_model_len)
    limits = ModelLimits(max_model_len, VOCAB_SIZE, frozenset())
    engines = []

    def make_engine(drafter: Drafter) -> Engine:
        engines.append(Engine(header.make_scheduler(drafter=drafter), runner, limits))
        return engines[-1]

    costs = measure_step_costs(make_engine)
    assert tuple(size for size, _ in costs) == expected
    assert all(seconds > 0 for _, seconds in costs)
    assert not any(engine.has_work for engine in engines)
