"""Steps for a pipeline: several at a time, each with its share of the decodes, no token before the one before it."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.harness import Harness


@pytest.mark.parametrize("num_stages", [2, 3])
def test_decodes_are_shared_out_over_the_steps_that_run_at_a_time(num_stages: int) -> None:
    rng = random.Random()
    harness = Harness(num_stages=num_stages, depth=num_stages, num_pages=60, max_num_seqs=8, budget=64)
    for _ in range(8):
        harness.add([rng.randrange(50) for _ in range(rng.randrange(1, 9))], 12)
    share, sizes = -(-8 // num_stages), []
    while harness.engine.has_work:
        harness.step()
        if harness.scheduler.num_running == 8 and not harness.scheduler.num_waiting:
            for step in harness.scheduler.in_flight:
                if step.plan.num_scheduled.max() == 1:
                    sizes.append(len(step.plan.rows))
    assert sizes and max(sizes) <= share, "every step leaves decodes to the others"
    assert sizes.count(share) > len(sizes) / 2, "and takes as many as it may"
    harness.drain()


def test_a_long_prompt_runs_in_several_stages_at_once() -> None:
    harness = Harness(num_stages=2, depth=2, num_pages=60, max_model_len=64, budget=8)
    harness.add(list(range(40)), 4)
    launched = []
    launch = harness.runner.launch
    harness.runner.launch = lambda plan: launched.append(len(harness.scheduler.in_flight)) or launch(plan)
    harness.drain()
    assert launched[:5] == [1, 2, 2, 2, 2], "a chunk is launched beside the one before it"
    assert launched[5:] == [1, 1, 1], "a token only behind the one before it"
