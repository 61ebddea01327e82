"""Executors: steps in the order of their launch, and none behind a failed one until it is taken back."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from tokenmill.core.errors import EngineFailed
from tokenmill.core.plan import StepOutcome, StepPlan, StepResult
from tokenmill.engine.runner.executor import Executor, InlineExecutor, ThreadExecutor

EMPTY = np.empty(0, dtype=np.int32)
KINDS = [InlineExecutor, ThreadExecutor]


def plan_of(step: int) -> StepPlan:
    return StepPlan(step, (), (), EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY)


class Steps:
    """Notes what is done and where. Steps in `failing` raise when they start, those in `ending_badly` at their end."""

    def __init__(self, failing: set[int] | None = None, ending_badly: set[int] | None = None) -> None:
        self.failing = failing or set()
        self.ending_badly = ending_badly or set()
        self.started: list[int] = []
        self.ended: list[int] = []
        self.previous: list[StepOutcome | None] = []
        self.threads: set[int] = set()
        self.may_go = threading.Event()
        self.may_go.set()
        self.is_closed = False

    def start(self, plan: StepPlan, previous: StepOutcome | None) -> Callable[[], StepResult]:
        assert self.may_go.wait(30)
        self.started.append(plan.step)
        self.previous.append(previous)
        self.threads.add(threading.get_ident())
        if plan.step in self.failing:
            raise ValueError(f"step {plan.step}")

        def finish() -> StepResult:
            if plan.step in self.ending_badly:
                raise ValueError(f"step {plan.step}")
            self.ended.append(plan.step)
            return StepResult(plan.step, EMPTY, EMPTY)

        return finish

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(params=KINDS, ids=["inline", "thread"])
def kind(request: pytest.FixtureRequest) -> type:
    return request.param


def results(steps: list[StepOutcome]) -> list[int | str]:
    found: list[int | str] = []
    for step in steps:
        try:
            found.append(step.result().step)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_steps_run_in_the_order_of_their_launch_and_each_ends_once(kind: type) -> None:
    runner = Steps()
    executor: Executor = kind(runner)
    steps = [executor.launch(plan_of(number)) for number in range(5)]
    assert results(steps) == results(steps) == [0, 1, 2, 3, 4]
    assert runner.started == runner.ended == [0, 1, 2, 3, 4]
    assert runner.previous[0] is None
    assert None not in runner.previous[1:]
    executor.close()
    assert runner.is_closed


@pytest.mark.parametrize("at_the_end", [False, True])
def test_behind_a_failed_step_all_are_refused_until_it_is_taken_back(kind: type, at_the_end: bool) -> None:
    runner = Steps(**{"ending_badly" if at_the_end else "failing": {1}})
    executor: Executor = kind(runner)
    steps = [executor.launch(plan_of(number)) for number in range(2)]
    found = results(steps)
    steps = [executor.launch(plan_of(number)) for number in (2, 3)]
    refusal = "RuntimeError: a step before this one failed"
    assert found + results(steps) == [0, "ValueError: step 1", refusal, refusal]
    assert runner.started == [0, 1]
    executor.recover()
    assert results([executor.launch(plan_of(4))]) == [4]
    assert runner.previous[-1] is None
    executor.close()


def test_recovery_waits_for_what_is_launched(kind: type) -> None:
    runner = Steps(failing={0})
    executor: Executor = kind(runner)
    if kind is ThreadExecutor:
        runner.may_go.clear()
        threading.Timer(0.1, runner.may_go.set).start()
    steps = [executor.launch(plan_of(number)) for number in range(3)]
    executor.recover()
    assert runner.started == [0], "those behind it were refused, not run after the recovery"
    assert all(step.error is None for step in steps) == (kind is ThreadExecutor), "nobody has asked yet"
    assert results([executor.launch(plan_of(3))]) == [3]
    assert [str(one).split(":")[0] for one in results(steps)] == ["ValueError", "RuntimeError", "RuntimeError"]
    executor.close()


def test_a_dead_device_is_told_from_a_failed_step() -> None:
    alive = InlineExecutor(Steps(failing={0, 1}), lambda: None)
    results([alive.launch(plan_of(0))])
    alive.recover()

    def dead() -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA")

    runner = Steps(failing={0})
    executor = InlineExecutor(runner, dead)
    results([executor.launch(plan_of(0))])
    with pytest.raises(EngineFailed, match=r"runs no further step: CUDA error: an illegal memory access$"):
        executor.recover()
    executor.close()
    assert runner.is_closed, "an engine that has failed is closed like any other"


def test_an_inline_step_ends_when_it_is_asked_and_one_on_a_thread_by_itself() -> None:
    inline, threaded = Steps(), Steps()
    executors = [InlineExecutor(inline), ThreadExecutor(threaded)]
    steps = [executor.launch(plan_of(0)) for executor in executors]
    assert (inline.started, inline.ended) == ([0], [])
    executors[1].close()
    assert threaded.ended == [0]
    assert results(steps) == [0, 0]
    assert inline.threads == {threading.get_ident()}
    assert threaded.threads.isdisjoint(inline.threads)
