"""A run has one seed, from which all follows that its tests draw; nothing is drawn from elsewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.house.source_tree import ROOT
from tests.seeding import root_seed, seed_globals

# A module that draws in all the ways that tests do, and writes down what it drew.
HEAD = """
import os, random
import numpy as np
import pytest
from hypothesis import given, settings, strategies
from tests.seeding import seed_for

SEED = seed_for(__name__)

def note(*drawn):
    with open(os.environ["NOTES"], "a") as notes:
        print(os.environ["PYTEST_CURRENT_TEST"].split()[0].rpartition("::")[2], *drawn, file=notes)

@pytest.fixture(scope="module")
def shared():
    return random.random(), np.random.random()

@settings(max_examples=5, database=None)
@given(strategies.integers(0, 10**6))
def test_hypothesis(number): note(number)

"""
TESTS = """\
def test_module(): note(SEED)
def test_random(): note(random.random())
def test_numpy(): note(np.random.random())
def test_rng(rng): note(rng.random())
def test_shared(shared): note(shared, random.random())
def test_shared_again(shared): note(shared, random.random())
def test_red(): assert "red" in os.environ
"""
# What else is installed takes seconds to load.
PLUGINS = ("-p", "xdist", "-p", "_hypothesis_pytestplugin", "-p", "tests.seeding", "-p", "no:cacheprovider")


def drawn(folder: Path, *arguments: str, seed: str | None = None, turned: bool = False) -> tuple[set[str], str]:
    """Return the draws of the module's tests, and pytest's output; `turned`: run from the last test to the first."""
    tests = TESTS.splitlines(keepends=True)
    (folder / "test_draws.py").write_text(HEAD + "".join(tests[::-1] if turned else tests))
    notes = folder / "notes"
    notes.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "SEED"))}
    environment |= {"NOTES": str(notes), "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if seed is not None:
        environment["SEED"] = seed
    command = [sys.executable, "-m", "pytest", *PLUGINS, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1, f"one test fails on purpose:\n{done.stdout}{done.stderr}"
    return set(notes.read_text().splitlines()), done.stdout


@pytest.mark.processes
def test_the_seed_that_a_run_prints_repeats_it_in_another_order_and_without_workers(tmp_path: Path) -> None:
    first, said = drawn(tmp_path, "-n", "2")
    assert len({line.split()[0] for line in first}) == 7
    found = re.search(r'SEED=(\d+).* python -m pytest "test_draws.py::test_red"', said)
    assert found is not None, f"with the failure: {said}"
    again, said = drawn(tmp_path, seed=found[1], turned=True)
    assert again == first
    assert re.search(rf"^seed: SEED={found[1]}\b", said, re.MULTILINE), "at the head"


@pytest.mark.processes
def test_another_run_draws_others_and_a_test_alone_what_it_draws_among_others(tmp_path: Path) -> None:
    among, _ = drawn(tmp_path, seed="7")
    alone, _ = drawn(tmp_path, *(f"test_draws.py::test_{name}" for name in ("shared_again", "red")), seed="7")
    other, _ = drawn(tmp_path)
    assert len(alone) == 1
    assert alone < among
    assert not {line for line in among & other if "hypothesis" not in line}


@pytest.mark.parametrize("has_gpu", [False, True])
def test_torch_is_seeded_where_it_is_loaded(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    seeded, cuda = SimpleNamespace(manual_seed=seeds.append), SimpleNamespace(is_available=lambda: has_gpu)
    torch = SimpleNamespace(default_generator=seeded, cuda=cuda, **(vars(seeded) if has_gpu else {}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    for name in ("one", "two", "one"):
        seed_globals(name)
    assert seeds[0] == seeds[2] != seeds[1]


def test_a_seed_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "seven")
    with pytest.raises(pytest.UsageError, match="SEED=seven is not a whole number"):
        root_seed()


FRESH = re.compile(r"SystemRandom|^os\.urandom$|^torch\.seed$")
FRESH_WITHOUT_ARGUMENTS = re.compile(r"(\brandom\.Random|default_rng|random\.seed)$")
FRESH_AT_IMPORT = re.compile(r"^(random\.[a-z]|np\.random\.(?!default_rng)|torch\.rand)")


def fresh_draws(path: Path) -> Iterator[str]:
    """Name the calls of a file whose outcome no seed decides."""
    text = path.read_text()
    if not re.search(r"rand|seed", text):
        return
    for call, is_inside in calls(ast.parse(text), False):
        name = name_of(call.func)
        if (
            FRESH.search(name)
            or (FRESH_WITHOUT_ARGUMENTS.search(name) and not call.args)
            or (FRESH_AT_IMPORT.search(name) and not is_inside)
        ):
            yield f"{path.relative_to(ROOT)}:{call.lineno} {name}"


def calls(node: ast.AST, is_inside: bool) -> Iterator[tuple[ast.Call, bool]]:
    """Every call below a node, and whether it stands in a function, which no import runs."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call):
            yield child, is_inside
        is_body = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and child in node.body
        yield from calls(child, is_inside or is_body or isinstance(node, ast.Lambda))


def name_of(node: ast.expr) -> str:
    """The dotted name of what is called."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{name_of(node.func)}()"
    return node.id if isinstance(node, ast.Name) else "?"


def test_nothing_is_drawn_that_no_seed_decides() -> None:
    """`seed_for(__name__)` where a module is imported; in a test `random`, numpy and torch are seeded already."""
    files = sorted(path for path in (ROOT / "tests").rglob("*.py") if path.name != "seeding.py")
    assert not [draw for path in files for draw in fresh_draws(path)]


@pytest.mark.parametrize(
    ("line", "is_fresh"),
    [
        ("SEED = random.randrange(10)", True),
        ("def f(): return random.randrange(10)", False),
        ("def f(): return random.SystemRandom().randrange(10)", True),
        ("def f(): return np.random.default_rng()", True),
        ("R = np.random.default_rng(3)", False),
        ("R = random.Random(3)", False),
    ],
)
def test_fresh_draws_are_found(line: str, is_fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "x.py").write_text(line)
    assert bool(list(fresh_draws(tmp_path / "x.py"))) == is_fresh
