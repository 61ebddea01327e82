"""Kernels against their references: the same tests that CPUs run interpreted, here on the device."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "model" / "kernels"
# `--confcutdir` keeps away what the whole suite needs besides pytest; the plugin that draws inputs needs nothing more.
OPTIONS = (
    "-v",
    "--tb=short",
    "-p",
    "no:cacheprovider",
    "-p",
    "tests.seeding",
    "-o",
    "addopts=",
    "--confcutdir=tests/model/kernels",
)
TEST_SECONDS = 120
# A line of `pytest -v`, alone or of one of xdist's workers.
_WORD = "PASSED|FAILED|ERROR|SKIPPED"
_OUTCOME = re.compile(rf"(?P<first>{_WORD})? ?(?P<file>tests/\S+?\.py)::(?P<test>.+?)(?: (?P<last>{_WORD}).*)?$")
_TAIL_LINES = 60


def files_for(device: str) -> list[str]:
    """The files of tests that have something to run on a device.

    What compiles without a device has been compiled before. On a CPU one file stands for all, to show that this runs.
    """
    files = [path.name for path in sorted(TESTS.glob("test_triton_*.py")) if path.name != "test_triton_compiles.py"]
    if device == "cpu":
        return [name for name in files if "norm" in name]
    return [*files, "test_fp8.py"]


def check_kernels(device: str) -> Iterator[dict[str, Any]]:
    """A row for each test that fails, as soon as it does, and one for each file at the end."""
    command = [sys.executable, "-m", "pytest", *OPTIONS]
    if importlib.util.find_spec("xdist") is not None and device == "cuda":
        command += ["-n", str(min(12, os.cpu_count() or 1))]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command += [f"--timeout={TEST_SECONDS}"]
    command += [f"tests/model/kernels/{name}" for name in files_for(device)]
    counts: dict[str, Counter[str]] = {name: Counter() for name in files_for(device)}
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None, "its output was asked for"
    for line in process.stdout:
        tail.append(line)
        outcome = outcome_of(line)
        if outcome is not None:
            file, test, word = outcome
            counts[file][word] += 1
            if word in ("FAILED", "ERROR"):
                yield {"check": f"{Path(file).stem}: {test}", "passed": False, "detail": word.lower()}
    code = process.wait()
    yield from (_row(file, count) for file, count in counts.items())
    if code not in (0, 5):
        yield {"check": "pytest", "passed": False, "detail": "".join(tail)[-4000:]}


def outcome_of(line: str) -> tuple[str, str, str] | None:
    """File, test and outcome that a line of pytest's tells of, if it does."""
    # Lines that begin with a word are of the summary at the end.
    match = None if line.startswith(("FAILED", "ERROR")) else _OUTCOME.search(line.rstrip())
    word = match and (match["first"] or match["last"])
    return None if match is None or word is None else (Path(match["file"]).name, match["test"], word)


def _row(file: str, count: Counter[str]) -> dict[str, Any]:
    failed = count["FAILED"] + count["ERROR"]
    detail = f"{count['PASSED']} passed, {failed} failed, {count['SKIPPED']} skipped"
    passed = False if failed else True if count["PASSED"] else None
    return {"check": Path(file).stem, "passed": passed, "detail": detail if count else "nothing ran"}
