"""Measure the tests of scheduler/ and kv/: seed faults into a copy of the source and count those caught.

    python benchmarks/mutants.py [--count 60] [--seed 0] [--jobs 2]

A fault is a small change of the syntax tree: a comparison or an arithmetic operator turned, a condition negated, a
number off by one, a statement left out. Assertions, decorators, docstrings and texts are left alone: assertions are the
tests' helpers, and a message or a dataclass's slots are not behaviour.
Prints each survivor and, as the last line, one JSON document.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("scheduler", "kv")
TESTS = (
    "tests/kv/test_*.py",
    "tests/scheduler/test_*.py",
    "tests/engine/loop/test_step_log.py",
    "tests/engine/loop/test_watchdog.py",
    "tests/engine/loop/test_kv_publisher.py",
)
LONGEST = "test_random_traces.py"
# Of processor time, so that a busy machine ends nothing; the wall-clock limit is for a test that sleeps for ever.
CPU_SECONDS = 120
WALL_SECONDS = 1800

# An editable install may bring an import hook that goes before PYTHONPATH: every run would test the unchanged source.
RUN_PYTEST = """
import resource, sys
from importlib.machinery import PathFinder
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]), int(sys.argv[2])))
sys.meta_path.insert(0, PathFinder)
import pytest, tokenmill
assert tokenmill.__file__.startswith(sys.argv[1]), f"{tokenmill.__file__} is not the copy under test"
sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-o", "timeout=0", *sys.argv[3:]]))
"""

TURNED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Fault:
    """One change to one file."""

    file: Path
    line: int
    what: str
    source: str


def main() -> None:
    """Draw faults, run the tests against each, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="faults to seed; 0: all there are")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at the same time")
    arguments = parser.parse_args()

    files = [file for package in PACKAGES for file in sorted((ROOT / "src/tokenmill" / package).glob("*.py"))]
    faults = [fault for file in files for fault in faults_of(file)]
    total = len(faults)
    if arguments.count:
        faults = random.Random(arguments.seed).sample(faults, min(arguments.count, total))
    if run_tests(None):
        sys.exit("the tests fail without any fault")
    caught = 0
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = track(pool.map(run_tests, faults), "seeding faults", len(faults))
        for fault, is_caught in zip(faults, outcomes, strict=True):
            caught += is_caught
            if not is_caught:
                print(f"survived: {fault.file.relative_to(ROOT)}:{fault.line}: {fault.what}", flush=True)
    report = {"faults": len(faults), "possible": total, "caught": caught, "share": round(caught / len(faults), 3)}
    print(json.dumps(report | {"seed": arguments.seed}))


def faults_of(file: Path) -> Iterator[Fault]:
    """Every fault that can be seeded into a file."""
    tree = ast.parse(file.read_text())
    nodes = list(ast.walk(tree))
    left_alone = [node for node in nodes if is_check(node)]
    left_alone += [part for node in nodes for part in getattr(node, "decorator_list", ())]
    skipped = {id(inner) for node in left_alone for inner in ast.walk(node)}
    for number, node in enumerate(nodes):
        if id(node) in skipped:
            continue
        for what, change in changes(node):
            mutant = copy.deepcopy(tree)
            # deepcopy keeps the order of the walk, so the node's number finds its copy.
            change(list(ast.walk(mutant))[number])
            yield Fault(file, getattr(node, "lineno", 0), what, ast.unparse(ast.fix_missing_locations(mutant)))


def is_check(node: ast.AST) -> bool:
    """True for what exists to find faults: assertions and the invariant checks."""
    return isinstance(node, ast.Assert) or (isinstance(node, ast.FunctionDef) and node.name == "check_invariants")


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[..., None]]]:
    """The ways to break a node: a description, and what does it to a copy."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
        turned = TURNED[type(node.ops[0])]
        yield f"{ast.unparse(node)}: {turned.__name__}", lambda n: n.ops.__setitem__(0, turned())
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in TURNED:
        turned = TURNED[type(node.op)]
        yield f"{ast.unparse(node)}: {turned.__name__}", lambda n: setattr(n, "op", turned())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"{ast.unparse(node)}: no not", lambda n: setattr(n, "op", ast.UAdd())
    elif isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Constant):
        yield f"if {ast.unparse(node.test)}: negated", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield f"{node.value}: one more", lambda n: setattr(n, "value", n.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield f"{node.value}: turned", lambda n: setattr(n, "value", not n.value)
    if isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.While):
        yield from omissions(node)


def omissions(node: ast.FunctionDef | ast.If | ast.For | ast.While) -> Iterator[tuple[str, Callable[..., None]]]:
    """Statements of a body that can be left out."""
    for index, statement in enumerate(node.body):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield (
                f"{ast.unparse(statement)}: left out",
                lambda n, index=index: n.body.__setitem__(index, ast.Pass()),
            )


def test_files() -> list[str]:
    """The files of `TESTS`, the longest last: most faults are caught without it."""
    files = [file for pattern in TESTS for file in sorted(ROOT.glob(pattern))]
    return [str(file) for file in sorted(files, key=lambda file: file.name == LONGEST)]


def run_tests(fault: Fault | None) -> bool:
    """True if the tests fail (or hang) with this fault in the source."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
        if fault is not None:
            (source / fault.file.relative_to(ROOT / "src")).write_text(fault.source)
        command = [sys.executable, "-c", RUN_PYTEST, str(source), str(CPU_SECONDS), *test_files()]
        environment = os.environ | {"PYTHONPATH": str(source), "TOKENMILL_HYPOTHESIS_PROFILE": "mutants"}
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, timeout=WALL_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return True
        return done.returncode != 0


if __name__ == "__main__":
    main()
