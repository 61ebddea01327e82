"""Steps that bring a request several tokens, or fewer than were drafted: nothing but the number of steps changes."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.engine.scheduler.drafters import HalfRightDrafter
from tests.engine.scheduler.harness import Harness
from tokenmill.core.request import FinishReason, Request, TokenArray
from tokenmill.lab.conformance.memory_runner import expected_output


def counts_of(harness: Harness) -> set[int]:
    """Return the number of tokens that a step brought each request that sampled."""
    return {
        count
        for plan, starts in zip(harness.runner.plans, harness.runner.starts, strict=True)
        for count, wanted in zip(np.diff(starts).tolist(), plan.num_samples.tolist(), strict=True)
        if wanted
    }


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_brings_one_to_five_tokens_and_no_output_changes(depth: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    seen: set[int] = set()
    num_preemptions = 0
    for _ in range(75):
        harness = Harness(
            depth=depth,
            drafts=4,
            num_pages=rng.randint(9, 14),
            page_size=rng.choice([1, 2, 4]) * 2,
            policy=rng.choice(["fair", "fcfs", "priority"]),
            batch_policy=rng.choice(["mixed", "decode-first", "prefill-first"]),
            admission=rng.choice(["whole-prompt", "optimistic", "reserve"]),
            max_model_len=18,
            eos=frozenset({3, 11}),
        )
        for _ in range(rng.randint(3, 9)):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
            for _ in range(rng.choice([1, 1, 3])):
                harness.add(prompt, rng.randint(1, 12), tenant=rng.choice("ab"), priority=rng.randint(0, 1))
            for _ in range(rng.randint(0, 6)):
                harness.step()
            if rng.random() < 0.2:
                harness.abort(str(rng.randrange(len(harness.records))))
        harness.drain()
        seen |= counts_of(harness)
        num_preemptions += harness.scheduler.state.num_preemptions
    assert seen == {1, 2, 3, 4, 5}
    assert num_preemptions > 0


class AlwaysRight(HalfRightDrafter):
    """Proposes as many tokens as it may, all of them right."""

    def draft(self, request: Request, limit: int) -> TokenArray:
        return np.array(expected_output(request.token_ids.tolist(), min(limit, self.most)), dtype=np.int32)


def test_right_drafts_save_steps() -> None:
    plain, drafted = Harness(), Harness()
    drafted.scheduler.state.drafters = (AlwaysRight(4),)
    for harness in (plain, drafted):
        harness.add([1, 2, 3], 21)
        harness.drain()
    assert plain.records["0"].tokens == drafted.records["0"].tokens
    # A prompt with its first token, then 20 tokens, five a step.
    assert (len(plain.runner.plans), len(drafted.runner.plans)) == (21, 5)


def test_a_stop_inside_the_drafts_cuts_the_tail() -> None:
    harness = Harness(eos=frozenset(range(0, 50, 5)))
    harness.scheduler.state.drafters = (AlwaysRight(4),)
    for start in range(12):
        harness.add([start, 1, 2], 24)
    harness.drain()
    stopped = [record for record in harness.records.values() if record.finish_reason is FinishReason.STOP]
    assert stopped
    assert all(record.tokens[-1] % 5 == 0 and all(t % 5 for t in record.tokens[:-1]) for record in stopped)


def test_accepted_drafts_become_matchable_and_rejected_ones_do_not() -> None:
    harness = Harness(drafts=4, page_size=2, num_pages=24)
    harness.add([1, 2, 3], 20)
    harness.drain()
    tokens = [1, 2, 3, *harness.records["0"].tokens]
    harness.add(tokens, 4)
    harness.drain()
    # 23 tokens, of which the last was never run; the last of a prompt is always run.
    assert harness.records["1"].num_cached_tokens == 22
    for end in range(4, 20):
        other = [*tokens[:end], 49, 49]
        harness.add(other, 3)
        harness.drain()
    harness.check_outputs()


def test_drafts_take_only_what_a_step_has_left() -> None:
    harness = Harness(budget=6, max_num_seqs=4, num_pages=40)
    harness.scheduler.state.drafters = (AlwaysRight(4),)
    for start in range(4):
        harness.add([start], 12)
    harness.drain()
    for plan in harness.runner.plans:
        own = plan.num_scheduled - np.maximum(plan.num_samples - 1, 0)
        assert plan.num_tokens <= 6
        assert (own >= 1).all()
    decoding = [plan for plan in harness.runner.plans if len(plan.rows) == 4 and not plan.new_rows]
    assert decoding, "all four decode together although one of them could have filled the step with drafts"


def test_nobody_is_preempted_for_a_draft() -> None:
    plain, drafted = (Harness(num_pages=8, page_size=2, max_num_seqs=2, max_model_len=8) for _ in range(2))
    drafted.scheduler.state.drafters = (AlwaysRight(4),)
    for harness in (plain, drafted):
        harness.add([1], 7)
        harness.add([2], 7)
        harness.drain()
    assert drafted.scheduler.state.num_preemptions == plain.scheduler.state.num_preemptions == 0
