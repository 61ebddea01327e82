"""Steps for a pipeline: several at a time, each with its share of the decodes, no token before the one before it."""

from __future__ import annotations

import random

import pytest

from tests.engine.scheduler.harness import Harness
from tests.seeding import seed_for


@pytest.mark.parametrize(("num_requests", "num_stages", "share"), [(60, 2, 30), (60, 3, 20), (8, 2, 8)])
def test_decodes_are_shared_out_over_the_steps_that_run_at_a_time(
    num_requests: int, num_stages: int, share: int
) -> None:
    """But only if there are many: each step reads all weights."""
    rng = random.Random(seed_for(__name__))
    harness = Harness(
        num_stages=num_stages, depth=num_stages, num_pages=900, max_num_seqs=num_requests, budget=1000, max_model_len=64
    )
    for number in range(num_requests):
        harness.add([number % 50, number // 50, *(rng.randrange(50) for _ in range(rng.randrange(9)))], 40)
    sizes = []
    launch = harness.runner.launch
    harness.runner.launch = lambda plan: sizes.append(len(plan.rows)) or launch(plan)
    harness.drain()
    assert sizes[0] == num_requests, "prompts go together"
    assert set(sizes[1:]) == {share}, "decodes in equal shares"


def test_a_long_prompt_runs_in_several_stages_at_once() -> None:
    harness = Harness(num_stages=2, depth=2, num_pages=60, max_model_len=64, budget=8)
    harness.add(list(range(40)), 4)
    launched = []
    launch = harness.runner.launch
    harness.runner.launch = lambda plan: launched.append(len(harness.scheduler.in_flight)) or launch(plan)
    harness.drain()
    assert launched[:5] == [1, 2, 2, 2, 2], "a chunk is launched beside the one before it"
    assert launched[5:] == [1, 1, 1], "a token only behind the one before it"
