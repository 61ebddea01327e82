"""Find the requests that ran when an engine died, and the one to blame."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.ipc.crash_attribution import (
    PAGE_BYTES,
    CrashAttribution,
    MarkingExecutor,
    RunningPage,
    page_path,
    running_at_death,
)


def test_the_page_says_who_ran_last(tmp_path: Path) -> None:
    page = RunningPage(path := page_path(tmp_path, "engine-0"))
    assert running_at_death(path) == []
    for ids in (["a", "b"], [], ["c"]):
        page.write(ids)
        assert running_at_death(path) == ids


def test_without_a_page_nobody_ran(tmp_path: Path) -> None:
    assert running_at_death(page_path(tmp_path, "engine-0")) == []


def test_a_page_that_is_being_written_says_nobody(tmp_path: Path) -> None:
    page = RunningPage(path := page_path(tmp_path, "engine-0"))
    page.write(["a"])
    with path.open("r+b") as file:
        file.write(bytes(4))  # what `write` does first
    assert running_at_death(path) == []


def test_more_than_the_page_holds_is_cut(tmp_path: Path) -> None:
    page = RunningPage(path := page_path(tmp_path, "engine-0"))
    ids = [f"request-{number}" for number in range(PAGE_BYTES // 8)]
    page.write(ids)
    found = running_at_death(path)
    assert found[:-1] == ids[: len(found) - 1]
    assert ids[len(found) - 1].startswith(found[-1])


def test_a_launch_marks_its_own_requests_and_those_in_flight(tmp_path: Path) -> None:
    page = RunningPage(path := page_path(tmp_path, "engine-0"))
    seen: list[list[str]] = []
    inner: Any = SimpleNamespace(launch=lambda plan: seen.append(running_at_death(path)) or plan)
    in_flight: list[Any] = []
    executor = MarkingExecutor(inner, in_flight, page)
    for ids in (["a", "b"], ["b", "c"]):
        in_flight.append(SimpleNamespace(requests=[SimpleNamespace(id=one) for one in ids]))
        executor.launch(SimpleNamespace())  # type: ignore[arg-type]
    assert seen == [["a", "b"], ["a", "b", "c"]]


def test_who_was_there_twice_alone_is_convicted() -> None:
    suspicion = CrashAttribution()
    assert suspicion.died(["a", "b", "c"], "engine 0") == (["a", "b", "c"], [])
    suspicion.clear(["a"])
    assert suspicion.died(["b", "x"], "engine 0") == (["x"], ["b"])
    assert suspicion.under_trial == ["engine 0"]
    suspicion.clear(["c", "x"])
    assert suspicion.under_trial == []


def test_two_who_were_there_twice_are_tried_again() -> None:
    suspicion = CrashAttribution()
    suspicion.died(["a", "b"], "engine 0")
    assert suspicion.died(["a", "b"], "engine 0") == (["a", "b"], [])


def test_an_engine_that_dies_idle_accuses_nobody() -> None:
    suspicion = CrashAttribution()
    assert suspicion.died([], "engine 0") == ([], [])
    assert suspicion.under_trial == []


@given(st.lists(st.lists(st.sampled_from("abcdef"), unique=True, max_size=4), max_size=8), st.randoms())
def test_nobody_is_convicted_who_was_not_under_suspicion(deaths: list[list[str]], rng: Any) -> None:
    suspicion, suspects = CrashAttribution(), set[str]()
    for running in deaths:
        cleared = [one for one in suspects if rng.random() < 0.5]
        suspicion.clear(cleared)
        suspects -= set(cleared)
        again, convicted = suspicion.died(running, "engine 0")
        assert set(again) | set(convicted) == set(running) and not set(again) & set(convicted)
        assert set(convicted) <= suspects and len(convicted) <= 1
        suspects = (suspects | set(again)) - set(convicted)
        assert bool(suspicion.under_trial) == bool(suspects)
