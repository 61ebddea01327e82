"""Each test has a tier; the tables name files that exist, and the guard of `make check` fails what does not belong."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import tier_tables
from tests.house.source_tree import ROOT
from tests.tier_tables import Pool
from tests.tiers import drawn_cases, marks_of, pairs, scaled, shuffled, some, tier

MODULE = """
import os, subprocess, sys
import pytest

def test_plain(): pass
def test_git(): subprocess.run(["true"], check=True)
def test_small(): subprocess.run([sys.executable, "-c", ""], check=True)
def test_child(): subprocess.run([sys.executable, "-m", "tokenmill", "--help"], check=False)
def test_hidden_child():
    try: subprocess.run(["pytest", "--version"], check=False)
    except RuntimeError: pass
def test_busy():
    before = os.times().user
    while os.times().user < before + 0.6: pass
@pytest.mark.processes
def test_marked_child(): subprocess.run([sys.executable, "-m", "pytest", "--version"], check=True)
@pytest.mark.nightly
def test_long(): pass
"""
# The limit of processor time is lowered: the guard is under test, not patience.
PLUGIN = "import tests.tiers\n\ntests.tiers.CPU_SECONDS = 0.4\n"


def outcomes(folder: Path, name: str, *arguments: str) -> dict[str, str]:
    """Return the outcome of each test of the module in a tier, in the order in which they ran."""
    (folder / "test_module.py").write_text(MODULE)
    (folder / "lowered.py").write_text(PLUGIN)
    environment = os.environ | {"TIER": name, "PYTHONPATH": f"{ROOT}:{folder}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = [part for plugin in ("tests.seeding", "tests.tiers", "lowered") for part in ("-p", plugin)]
    command = [sys.executable, "-m", "pytest", "-v", "--tb=line", *plugins, "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("test_module.py::")]
    return {words[0].partition("::test_")[2]: words[1].lower() for words in lines}


@pytest.mark.processes
def test_check_leaves_out_and_refuses_what_the_other_tiers_run(tmp_path: Path) -> None:
    check = outcomes(tmp_path, "check")
    assert check == {
        **dict.fromkeys(("plain", "git", "small"), "passed"),
        **dict.fromkeys(("child", "hidden_child", "busy"), "failed"),
    }
    test = outcomes(tmp_path, "test")
    assert test == dict.fromkeys(("plain", "git", "small", "child", "hidden_child", "busy", "marked_child"), "passed")


def test_the_seed_decides_the_order_of_files_and_of_their_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [(file, f"{file}::{test}") for file in ("a.py", "b.py", "c.py") for test in range(5)]
    items: list[Any] = [SimpleNamespace(location=(file, 0, ""), nodeid=name) for file, name in names]
    orders = []
    for seed in ("1", "1", "2"):
        monkeypatch.setenv("SEED", seed)
        orders.append([item.nodeid for item in shuffled(items)])
    assert orders[0] == orders[1] != orders[2]
    files = [name.partition("::")[0] for name in orders[0]]
    assert len(list(groupby(files))) == 3, "a file's tests stay together"


@pytest.mark.parametrize("table", [tier_tables.PROCESSES, tier_tables.SLOW], ids=["processes", "slow"])
def test_the_tables_name_files_that_exist(table: dict[str, str]) -> None:
    for folder, names in table.items():
        for name in names.split():
            path = ROOT / "tests" / folder / f"test_{name}.py"
            assert path.is_file() if name != "*" else path.parent.is_dir(), path


def test_a_file_has_the_marks_of_its_place() -> None:
    assert marks_of(ROOT / "tests/serving/server/test_split.py") == ("processes",)
    assert marks_of(ROOT / "tests/clients/test_instructor.py") == ("processes",)
    assert marks_of(ROOT / "tests/core/test_whole_file.py") == ()
    assert marks_of(Path("/elsewhere/test_split.py")) == ()


def test_long_forms_are_for_the_night(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIER", "test")
    assert scaled(7) == 7
    drawn = some(range(100), 5)
    assert drawn == some(range(100), 5) == sorted(drawn)
    assert len(drawn) == len(set(drawn)) == 5
    assert some("abc", 5) == ["a", "b", "c"]
    monkeypatch.setenv("TIER", "check")
    assert (scaled(70), scaled(7)) == (7, 1)
    monkeypatch.setenv("TIER", "nightly")
    assert scaled(7) == 70
    assert some(range(100), 5) == list(range(100))


@pytest.mark.parametrize(("first", "second"), [("abcdefg", "xyz"), ("ab", "wxyz"), ("abc", "xyz"), ("", "xyz")])
def test_of_pairs_each_part_is_there(first: str, second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [(one, other) for one in first for other in second]
    monkeypatch.setenv("TIER", "test")
    drawn = pairs(first, second)
    assert drawn == pairs(first, second) == sorted(set(drawn))
    assert set(drawn) <= set(every)
    assert not first or ({one for one, _ in drawn}, {other for _, other in drawn}) == (set(first), set(second))
    assert len(drawn) <= max(len(first), len(second))
    monkeypatch.setenv("TIER", "nightly")
    assert pairs(first, second) == every


def test_of_long_tests_some_cases_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def items(folder: str, *names: str) -> list[Any]:
        path = ROOT / "tests" / folder
        return [SimpleNamespace(path=path, nodeid=f"tests/{folder}::{name}") for name in names]

    cases = items("integration/test_tools.py", *(f"test_a[{number}]" for number in range(9)), "test_b")
    others = items("core/test_whole_file.py", *(f"test_a[{number}]" for number in range(9)))
    monkeypatch.setenv("TIER", "test")
    monkeypatch.setitem(tier_tables.DRAWN, "integration", {"tools": 3, "tools::test_c": 1})
    kept = drawn_cases([*cases, *others])
    assert kept == drawn_cases([*cases, *others])
    assert kept[-10:] == [cases[-1], *others]
    assert len(kept) == 3 + 10
    own = items("integration/test_tools.py", *(f"test_c[{number}]" for number in range(9)))
    assert len(drawn_cases([*own, *cases])) == 1 + 3 + 1
    monkeypatch.setitem(tier_tables.DRAWN, "integration", {"tools::*": 2})
    kept = drawn_cases([*own, *cases])
    assert kept == drawn_cases([*own, *cases])
    assert len({item.nodeid.partition("[")[0] for item in kept}) == 2, "of three tests, with all of their cases"
    assert len(kept) in (9 + 9, 9 + 1)
    monkeypatch.setenv("TIER", "nightly")
    assert drawn_cases([*cases, *others]) == [*cases, *others]


def test_of_a_pool_of_files_some_tests_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    files = ("test_ab", "test_ac", "test_ad")
    items: list[Any] = [
        SimpleNamespace(path=ROOT / f"tests/llm/{file}.py", nodeid=f"tests/llm/{file}.py::test_{test}[{case}]")
        for file in files
        for test in range(4)
        for case in range(2)
    ]
    monkeypatch.setenv("TIER", "test")
    monkeypatch.setitem(tier_tables.POOLS, "letters", Pool(5, "llm/ab llm/ac"))
    kept = drawn_cases(items)
    assert kept == drawn_cases(items)
    assert kept[-8:] == items[-8:], "the last file is in no pool"
    pooled = kept[:-8]
    assert len(pooled) == 10, "five tests with all of their cases"
    assert len({item.nodeid.partition("[")[0] for item in pooled}) == 5
    assert drawn_cases(items[:8]) == items[:8], "one file alone is smaller than its pool"
    monkeypatch.setenv("TIER", "nightly")
    assert drawn_cases(items) == items


def test_a_file_of_a_pool_exists_and_is_in_no_other() -> None:
    files = [file for pool in tier_tables.POOLS.values() for file in pool.files.split()]
    assert len(set(files)) == len(files)
    for file in files:
        folder, _, name = file.rpartition("/")
        assert (ROOT / "tests" / folder / f"test_{name}.py").is_file(), file
        assert f"{name}::*" not in tier_tables.DRAWN.get(folder, {}), f"{file} is drawn twice"


def test_what_cases_are_drawn_of_is_there() -> None:
    for folder, names in tier_tables.DRAWN.items():
        for name in names:
            file, _, test = name.partition("::")
            path = ROOT / "tests" / folder / f"test_{file}.py"
            assert path.is_file(), name
            assert f"def {test}(" in path.read_text() or test in ("", "*"), name


def test_an_unknown_tier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIER", "weekly")
    with pytest.raises(pytest.UsageError, match="TIER=weekly is unknown; choose one of check, test, nightly"):
        tier()
