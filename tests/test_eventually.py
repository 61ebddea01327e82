"""Conditions are asked for until they hold or patience ends."""

from __future__ import annotations

import asyncio

import pytest

from tests.eventually import eventually, eventually_async, patience


def test_the_first_true_value_is_returned() -> None:
    values = [0, 0, 3, 4]
    assert eventually(lambda: values.pop(0)) == 3
    assert values == [4]


def test_what_never_holds_fails_with_what_there_is_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_TEST_PATIENCE", "0.5")
    assert patience(4) == 2.0
    with pytest.raises(AssertionError, match="waited 0 s in vain: the log"):
        eventually(lambda: False, lambda: "the log", seconds=0)


def test_it_waits_among_other_tasks_for_coroutines_and_for_functions() -> None:
    async def run() -> None:
        state = {"is_set": False}

        async def is_set() -> bool:
            return state["is_set"]

        async def set_it() -> None:
            state["is_set"] = True

        waiting = asyncio.ensure_future(eventually_async(is_set))
        await set_it()
        assert await waiting
        assert await eventually_async(lambda: state["is_set"])
        with pytest.raises(AssertionError, match="waited 0 s in vain: it does not come about"):
            await eventually_async(lambda: False, seconds=0)

    asyncio.run(run())
