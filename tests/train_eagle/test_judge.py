"""Judging a head on known answers counts what a drafter would have accepted."""

from __future__ import annotations

import random

import torch
from examples.train_eagle.judge import Verdict, accepted_from, answers

from tests.seeding import seed_for


def walked(drafts: list[list[int]], ids: list[int], start: int, end: int) -> tuple[int, int]:
    """Return (steps, drafts accepted) of speculation, token by token."""
    known, steps, accepted = start + 1, 0, 0
    while known < end:
        steps += 1
        for depth, draft in enumerate(drafts):
            if known >= end or draft[known - 2 - depth] != ids[known]:
                break
            known, accepted = known + 1, accepted + 1
        known += 1
    return steps, accepted


def test_runs_of_answers_are_found():
    assert answers(torch.tensor([1, 0, 1, 1, 0, 0, 1]).bool()) == [(0, 1), (2, 4), (6, 7)]
    assert answers(torch.zeros(4).bool()) == []


def test_a_walk_takes_the_steps_that_speculation_takes():
    rng = random.Random(seed_for("walks"))
    for _ in range(50):
        length = rng.randint(8, 40)
        ids = [rng.randint(0, 1) for _ in range(length)]
        start = rng.randint(2, 4)
        end = rng.randint(start + 1, length)
        drafts = [[rng.randint(0, 1) for _ in range(length)] for _ in range(3)]
        verdict = Verdict.empty(3)
        accepted = accepted_from(torch.tensor(drafts), torch.tensor(ids), start, end)
        verdict.add(accepted)
        steps, right = walked(drafts, ids, start, end)
        assert verdict.steps == steps
        assert verdict.tokens == end - start - 1
        # The last step may also give a token that the answer no longer has.
        assert verdict.tokens - right in (steps, steps - 1)


def test_a_depth_counts_where_its_forerunners_were_right_and_the_answer_goes_on():
    verdict = Verdict.empty(2)
    verdict.add(torch.tensor([2, 1, 0, 0, 1, 0]))
    assert (verdict.tried, verdict.right) == ([6, 3], [3, 1])
    verdict.add(torch.tensor([0]))
    assert (verdict.tried, verdict.right) == ([7, 3], [3, 1])
    assert verdict.acceptance == [0.429, 0.333]
    # Three steps for the six tokens (from places 0, 3 and 4) and one for the other.
    assert verdict.tokens_a_step == round(7 / 4, 3)
