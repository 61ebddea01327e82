"""`make gpu` on a machine without a GPU: it says so; and its dry run goes through every part but the slow ones."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tools.gpu import jobs, one
from tools.gpu.engine_checks import check_names, checks_with
from tools.gpu.jobs import Job, Row, run_jobs
from tools.gpu.kernel_checks import outcome_of
from tools.gpu.machine import DryPlatform
from tools.gpu.report import markdown

from tests.house.source_tree import ROOT
from tests.model.kernels.gpu import DEVICE
from tools import gpu_check

SCRIPT = ROOT / "tools" / "gpu_check.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False, timeout=280, cwd=ROOT
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_with_a_code_of_its_own(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    assert done.returncode == 3
    assert "no GPU to check: torch finds none" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has checks of the engine run in this process, one by one: each of their own takes longest to load torch."""
    in_process = jobs._run

    def run(job: Job, seconds: float, tell: Callable[[Row], None]) -> None:
        if job.part != "engine":
            in_process(job, seconds, tell)
            return
        part, name, *_ = job.arguments
        folder = tmp_path / f"job-{name}"
        folder.mkdir()
        options = argparse.Namespace(part=part, name=name, device="cpu", seed=3, seconds=seconds)
        for row in one.rows_of(options, folder):
            tell({"part": job.part, **row})

    monkeypatch.setattr(jobs, "_run", run)
    monkeypatch.setitem(gpu_check.ENGINES_AT_A_TIME, "cpu", 1)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.usefixtures("here")
@pytest.mark.skipif(DEVICE != "cpu", reason="this machine has a GPU")
def test_the_dry_run_checks_and_measures_and_writes_both_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = ("--part", "engine", "--part", "benchmarks")
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", *parts, "--out", str(tmp_path), "--seed", "3"])
    assert gpu_check.main() == 0, (tmp_path / "gpu_check.md").read_text()
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert found["is_dry"]
    assert "kernels" not in found
    assert {row["check"]: row["passed"] for row in found["engine"]} == dict.fromkeys(check_names(is_dry=True), True)
    assert [row["what"].split(",")[0] for row in found["benchmarks"]] == [
        "decode",
        "prompt of 40 tokens",
        "engine's decode step",
        "offline recipe",
    ]
    assert "Its figures say nothing of any GPU" in (tmp_path / "gpu_check.md").read_text()
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == len(found["engine"]) + len(found["benchmarks"])


def test_every_check_of_the_engine_is_there(tmp_path: Path) -> None:
    for name in check_names(is_dry=False):
        assert callable(checks_with(name)(DryPlatform(), tmp_path, 0).work_of(name)), name


def test_a_job_that_takes_too_long_is_killed_and_the_next_one_runs(tmp_path: Path) -> None:
    rows: list[Row] = []
    slow = Job("engine", ("engine", "graphs-and-eager", "--device", "cpu"), 0.2)
    wrong = Job("engine", ("engine", "nothing-of-the-kind", "--device", "cpu"), 60)
    run_jobs([slow, wrong], 1, time.monotonic() + 100, rows.append)
    assert [row["passed"] for row in rows] == [False, False]
    assert rows[0]["detail"].endswith("killed after 0 s")
    assert "nothing_of_the_kind" in rows[1]["detail"]
    run_jobs([slow], 1, time.monotonic() - 1, rows.append)
    assert rows[2]["passed"] is None


@pytest.mark.parametrize(
    "line",
    [
        "tests/model/kernels/test_triton_heads.py::test_a_head[1-2] PASSED                    [ 10%]",
        "[gw3] [ 10%] PASSED tests/model/kernels/test_triton_heads.py::test_a_head[1-2] ",
        "tests/model/kernels/test_triton_heads.py::test_a_head[1-2] FAILED                    [ 10%]",
        "tests/model/kernels/test_triton_heads.py::test_a_head[1-2] ",
        "FAILED tests/model/kernels/test_triton_heads.py::test_a_head[1-2] - assert 1 == 2",
        "collected 3 items",
    ],
)
def test_lines_of_pytest_tell_what_became_of_a_test(line: str) -> None:
    word = "FAILED" if "FAILED" in line else "PASSED" if "PASSED" in line else None
    outcome = outcome_of(line)
    if line.startswith("FAILED"):
        assert outcome is None, "the summary at the end tells it a second time"
    else:
        assert outcome == (word and ("test_triton_heads.py", "test_a_head[1-2]", word))


def test_the_report_tells_what_failed_and_what_was_left_out() -> None:
    text = markdown(
        {
            "is_dry": False,
            "kernels": [{"check": "norm", "passed": False, "detail": "first\nlast | line"}],
            "engine": [{"check": "graphs", "passed": None, "detail": "no time was left"}],
            "benchmarks": [
                {"model": "m", "what": "decode", "ms": 2.0, "floor_ms": 1.0, "of_floor": 0.5},
                {"model": "m", "what": "large", "skipped": "its KV is too large"},
            ],
        }
    )
    assert "| norm | FAILED | last / line |" in text
    assert "| graphs | not run | no time was left |" in text
    assert "| m | decode | 2 | 1 | 50% |  |" in text
    assert "| m | large |  |  |  | its KV is too large |" in text
    assert "dry run" not in text
