"""Choose the tests of a run: three tiers, by the environment variable `TIER`.

- `check`: what a developer runs all day. No server or engine process, nothing slow, files and tests in random order.
- `test`, the default: all that a landing needs. Of tests with many cases that take long, some, drawn by the run's seed.
- `nightly`: long forms too, and every case.

A pytest plugin; tests/conftest.py loads it. tests/tier_tables.py names files, so that `check` does not even import the
others; single tests carry `@pytest.mark.processes`, `slow` or `nightly`. A guard fails what does not belong in `check`.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Generator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.seeding import seed_for
from tests.tier_tables import DRAWN, POOLS, PROCESSES, SLOW

TIERS = ("check", "test", "nightly")
MARKS = {
    "processes": "starts servers, engines or runs of tests: left out of `make check`",
    "slow": "takes seconds of processor time: left out of `make check`",
    "nightly": "a long form, or about how fast something is: run by `make nightly` alone",
}
# Of processor time, children's included. Tests of `make check` take a fraction; one over this is marked slow.
CPU_SECONDS = 8.0
# By how much random tests are shorter in `make check` than in `make test`, and longer in `make nightly`.
FACTOR = 10

# Programs and modules that take seconds to start.
LARGE = re.compile(
    r"^(tokenmill|.*/tokenmill|tokenmill\.(cli|startup|serving)\b.*|tests\.(engine|serving)\b.*|pytest)$"
)

TESTS = Path(__file__).parent

Case = TypeVar("Case")
Other = TypeVar("Other")
STARTED = pytest.StashKey[list[str]]()


def tier() -> str:
    """Return the tier that runs.

    Raises:
        pytest.UsageError: `TIER` names none.
    """
    name = os.environ.get("TIER", "test")
    if name not in TIERS:
        raise pytest.UsageError(f"TIER={name} is unknown; choose one of {', '.join(TIERS)}")
    return name


def scaled(count: int) -> int:
    """Return how many random cases to draw: `count`, a tenth of them in `check`, ten times as many in `nightly`."""
    return {"check": max(1, count // FACTOR), "test": count, "nightly": count * FACTOR}[tier()]


def some(cases: Sequence[Case], count: int) -> list[Case]:
    """Return `count` of the cases in their order, drawn by the seed of the run; all of them in `make nightly`."""
    if tier() == "nightly" or count >= len(cases):
        return list(cases)
    drawn = random.Random(seed_for(f"{count} of {len(cases)}")).sample(range(len(cases)), count)
    return [cases[index] for index in sorted(drawn)]


def pairs(first: Sequence[Case], second: Sequence[Other]) -> list[tuple[Case, Other]]:
    """Return pairs in which each of both is at least once, drawn by the seed of the run; all in `make nightly`."""
    places = [(row, column) for row in range(len(first)) for column in range(len(second))]
    if tier() != "nightly":
        rng = random.Random(seed_for(f"pairs of {len(first)} and {len(second)}"))
        rows, columns = (rng.sample(range(len(each)), len(each)) for each in (first, second))
        longer = max(len(rows), len(columns)) if places else 0
        drawn = {(rows[number % len(rows)], columns[number % len(columns)]) for number in range(longer)}
        places = sorted(drawn)
    return [(first[row], second[column]) for row, column in places]


def drawn_cases(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests without the cases that are not drawn; a test keeps as many as `DRAWN` says of its file."""
    files: dict[Path, dict[str, list[pytest.Item]]] = {}
    for item in items:
        files.setdefault(item.path, {}).setdefault(item.nodeid.partition("[")[0], []).append(item)
    pools = _pools(files)
    kept: list[pytest.Item] = []
    for path, cases in files.items():
        counts, file = _drawn_of(path), path.stem.removeprefix("test_")
        for name in pools.get(path, _drawn([*cases], counts.get(f"{file}::*"), f"tests of {path.name}")):
            count = counts.get(f"{file}::{name.rpartition('::')[2]}", counts.get(file))
            kept += _drawn(cases[name], count, f"cases of {name}")
    return kept


def _pools(files: dict[Path, dict[str, list[pytest.Item]]]) -> dict[Path, list[str]]:
    """Return the names of the tests that are drawn of each file of a pool."""
    drawn: dict[Path, list[str]] = {}
    for title, pool in POOLS.items():
        paths = [path for path in files if _place(path) in pool.files.split()]
        chosen = set(_drawn([(path, name) for path in paths for name in files[path]], pool.count, title))
        drawn |= {path: [name for name in files[path] if (path, name) in chosen] for path in paths}
    return drawn


def _place(file: Path) -> str:
    """Return a file's folder and name as the tables spell them."""
    folder = file.relative_to(TESTS).parent if file.is_relative_to(TESTS) else Path("elsewhere")
    return (folder / file.stem.removeprefix("test_")).as_posix()


def _drawn(every: list[Case], count: int | None, name: str) -> list[Case]:
    if count is None or len(every) <= count or tier() == "nightly":
        return every
    chosen = random.Random(seed_for(name)).sample(range(len(every)), count)
    return [every[index] for index in sorted(chosen)]


def _drawn_of(file: Path) -> dict[str, int]:
    return DRAWN.get(file.relative_to(TESTS).parent.as_posix(), {}) if file.is_relative_to(TESTS) else {}


@cache
def marks_of(file: Path) -> tuple[str, ...]:
    """Return the marks that a file's place in the tables gives its tests."""
    if not file.is_relative_to(TESTS):
        return ()
    folder = file.relative_to(TESTS).parent
    name = file.stem.removeprefix("test_")
    return tuple(mark for mark, table in (("processes", PROCESSES), ("slow", SLOW)) if _holds(table, folder, name))


def _holds(table: dict[str, str], folder: Path, name: str) -> bool:
    if name in table.get(folder.as_posix(), "").split():
        return True
    return any(table.get(parent.as_posix()) == "*" for parent in (folder, *folder.parents))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks; watch in `check` for processes that are started."""
    for name, text in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {text}")
    if tier() == "check":
        started: list[str] = []
        config.stash[STARTED] = started
        sys.addaudithook(lambda event, details: _refuse_children(started, event, details))


def _refuse_children(started: list[str], event: str, details: tuple[Any, ...]) -> None:
    """Note and refuse the start of a server, an engine or a run of tests. What is small may run: `git`, a sandbox."""
    if event == "subprocess.Popen" and "PYTEST_CURRENT_TEST" in os.environ:
        command = [os.fsdecode(word) for word in details[1]]
        if any(LARGE.search(word) for word in command):
            started.append(" ".join(command)[:200])
            raise RuntimeError(
                "a test of `make check` starts a process: mark it, or name its file in tests/tier_tables.py"
            )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out of `check` the files that the tables name, unread."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if tier() == "check" and is_test and marks_of(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark, leave out what belongs to other tiers, and shuffle the rest in `check`."""
    for item in items:
        for mark in marks_of(item.path):
            item.add_marker(mark)
    left_out = {"check": tuple(MARKS), "test": ("nightly",), "nightly": ()}[tier()]
    wanted = [item for item in items if not any(item.get_closest_marker(mark) for mark in left_out)]
    # Who names a test wants all of it.
    kept = wanted if any("::" in name for name in config.args) else drawn_cases(wanted)
    if others := list(set(items).difference(kept)):
        config.hook.pytest_deselected(items=others)
        items[:] = kept
    if tier() == "check":
        items[:] = shuffled(items)


def shuffled(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests in an order that the seed of the run decides: files, and tests within their file."""
    return sorted(items, key=lambda item: (seed_for(f"{item.location[0]} order"), seed_for(f"{item.nodeid} order")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test of `check` that started a process or was slow."""
    started = item.config.stash.get(STARTED, None)
    if started is None:
        return (yield)
    started.clear()
    before = cpu_seconds()
    outcome = yield
    took = cpu_seconds() - before
    if started:
        pytest.fail(
            f"it starts a process ({started[0]}): mark it, or name its file in tests/tier_tables.py", pytrace=False
        )
    if took > CPU_SECONDS:
        pytest.fail(
            f"it took {took:.1f} s of processor time: mark it slow, or name its file in tests/tier_tables.py", False
        )
    return outcome


def cpu_seconds() -> float:
    """Return the processor time of this process and of children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
