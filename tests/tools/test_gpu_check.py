"""`make gpu` on a machine without a GPU: it says so; and its dry run goes through every part but the slow ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tools.gpu.report import markdown

from tests.house.source_tree import ROOT

SCRIPT = ROOT / "tools" / "gpu_check.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False, timeout=280, cwd=ROOT
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_with_a_code_of_its_own(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path))
    assert done.returncode == 3
    assert "no GPU to check: --device cuda:" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_dry_run_checks_and_measures_and_writes_both_reports(tmp_path: Path) -> None:
    done = run("--device", "cpu", "--part", "engine", "--part", "benchmarks", "--out", str(tmp_path), "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert found["is_dry"]
    assert "kernels" not in found
    assert all(row["passed"] for row in found["engine"])
    assert {"graphs and eager", "preemption under a tiny pool"} <= {row["check"] for row in found["engine"]}
    assert [row["what"].split(",")[0] for row in found["benchmarks"]] == [
        "decode",
        "prompt of 40 tokens",
        "engine's decode step",
        "offline recipe",
    ]
    assert "Its figures say nothing of any GPU" in (tmp_path / "gpu_check.md").read_text()


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
