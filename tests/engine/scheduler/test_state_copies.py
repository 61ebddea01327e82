"""Requests that compute again what the prefix cache has, because no recurrent state was kept there, in a short pool."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.engine.scheduler.harness import Harness, Settings
from tokenmill.core.request import Request
from tokenmill.engine.scheduler.state import SchedulerState

SHORT = Settings(num_pages=12, page_size=1, max_num_seqs=1, state_slots=1)
Asked = tuple[list[int], int]


def num_run(harness: Harness) -> int:
    """Tokens that all plans ran."""
    return sum(int(plan.num_scheduled.sum()) for plan in harness.runner.plans)


def num_needed(harness: Harness) -> int:
    """Tokens that had to be run: of each request all but its last one, which is never run, less what it began behind.

    That is where its first plan has it begin, at a state that the cache had. What a request runs again after a
    preemption was not needed.
    """
    begins: dict[str, int] = {}
    for plan in harness.runner.plans:
        for request_id, begin in zip(plan.request_ids, plan.num_computed.tolist(), strict=True):
            begins.setdefault(request_id, begin)
    lengths = {name: len(record.prompt) + len(record.tokens) for name, record in harness.records.items()}
    return sum(lengths[name] - 1 - begin for name, begin in begins.items())


def ask_at_random(rng: random.Random) -> list[Asked]:
    """Prompts that are equal, begin alike, or begin as another goes on, and how many tokens are wanted behind them."""
    common = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
    asked = []
    for _ in range(rng.randint(2, 6)):
        begin = common[: rng.choice([len(common), len(common), rng.randint(1, len(common))])]
        asked.append((begin + [rng.randrange(3) for _ in range(rng.choice([0, 0, 1, 4]))], rng.randint(1, 12)))
    return asked


def settings_at_random(rng: random.Random, asked: list[Asked], max_num_seqs: int) -> Settings:
    """The longest request fits, and little more; the slots of states are one for each row, and few more."""
    page_size = rng.choice([1, 2, 4])
    longest = max(len(prompt) + max_tokens for prompt, max_tokens in asked)
    return Settings(
        num_pages=-(-longest // page_size) + rng.choice([0, 0, 1, 2, 6]),
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        state_slots=max_num_seqs + rng.choice([0, 0, 1, 2, 4]),
        budget=rng.choice([4, 8, 16]),
        threshold=rng.choice([0, 0, 3]),
        policy=rng.choice(["fair", "fcfs", "priority"]),
        batch_policy=rng.choice(["mixed", "decode-first", "prefill-first"]),
        depth=rng.choice([1, 1, 2, 3]),
    )


def run(
    settings: Settings,
    asked: list[Asked],
    rng: random.Random | None = None,
    state: type[SchedulerState] = SchedulerState,
) -> Harness:
    """Answer all of them; with `rng` they come between steps. `Harness.drain` has the bound on steps."""
    harness = Harness(settings)
    harness.scheduler.state.__class__ = state
    for prompt, max_tokens in asked:
        for _ in range(rng.randrange(6) if rng is not None else 0):
            if harness.engine.has_work:
                harness.step()
        harness.add(prompt, max_tokens)
    harness.drain()
    return harness


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [4, 16])
@pytest.mark.parametrize("state_slots", [1, 2, 4])
@pytest.mark.parametrize("admission", ["optimistic", "whole-prompt", "reserve"])
def test_the_same_prompt_again_never_yields_to_itself(
    admission: str, state_slots: int, budget: int, depth: int
) -> None:
    settings = replace(SHORT, admission=admission, state_slots=state_slots, budget=budget, depth=depth)
    harness = run(settings, [([0, 1, 2, 3], 8)] * 2)
    assert harness.scheduler.state.num_preemptions == 0
    again = 11 if state_slots == 1 else 8
    assert num_run(harness) == 11 + again, "the second begins behind its prompt's state, if there was a slot for one"


def test_what_a_copy_is_followed_by_can_be_found() -> None:
    harness = Harness(replace(SHORT, num_pages=24, page_size=4, max_num_seqs=2, state_slots=6, max_model_len=64))
    common = list(range(9))
    for last in ([20] * 8, [30] * 8, [30] * 8):
        harness.add([*common, *last], 2)
        harness.drain()
    assert [record.num_cached_tokens for record in harness.records.values()] == [0, 0, 16]
    assert harness.kv.pool.num_free + harness.kv.cache.num_evictable == 24


@pytest.mark.parametrize("admission", ["whole-prompt", "optimistic", "reserve"])
def test_one_row_runs_no_token_twice(admission: str) -> None:
    """At most 1.3 times what is needed is asked for; with one row nobody is there to yield to, so it is none at all."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(80):
        asked = ask_at_random(rng)
        settings = replace(settings_at_random(rng, asked, max_num_seqs=1), admission=admission)
        harness = run(settings, asked, rng)
        assert num_run(harness) == num_needed(harness), f"{settings}, {asked}"
        assert harness.scheduler.state.num_preemptions == 0


class NeverToItself(SchedulerState):
    """Preempts as ever, but not the only one that runs, unless a launched step of others still holds pages up."""

    def preempt(self, victim: Request) -> None:
        assert len(self.running) > 1 or self.num_returning_rows(), "a request has yielded to itself"
        super().preempt(victim)


@pytest.mark.parametrize("admission", ["whole-prompt", "optimistic", "reserve"])
def test_several_rows_come_to_an_end_and_nobody_yields_to_itself(admission: str) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(80):
        asked = ask_at_random(rng)
        settings = replace(settings_at_random(rng, asked, max_num_seqs=rng.randint(2, 4)), admission=admission)
        harness = run(settings, asked, rng, NeverToItself)
        assert harness.scheduler.state.num_preemptions == 0 or admission != "reserve"


def test_what_was_preempted_begins_anew_only_where_it_fits() -> None:
    """Its state is gone, so each new beginning runs all of it: a pool that is short again would end that in vain."""
    harness = Harness(replace(SHORT, num_pages=23, max_num_seqs=2, state_slots=2, budget=4, admission="optimistic"))
    for first in (1, 2):
        harness.add([first] * 13, 10)
    harness.drain()
    begins = [row.request_id for plan in harness.runner.plans for row in plan.new_rows]
    assert begins == ["0", "1", "1"]
