"""Kernels against their references: the same tests that CPUs run interpreted, here on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# `--confcutdir` keeps away what the whole suite needs besides pytest.
OPTIONS = ("-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=0", "--confcutdir=tests/kernels")


def check_kernels(device: str, seconds: float) -> list[dict[str, Any]]:
    """One row per file of tests: what pytest says of it."""
    files = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
    if device == "cpu":
        files = [path for path in files if "norm" in path.name]
    return [_run(path, seconds / len(files) * 2) for path in files]


def _run(path: Path, seconds: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", *OPTIONS, str(path.relative_to(ROOT))]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"check": path.stem, "passed": False, "detail": f"not done after {seconds:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    detail = lines[-1] if done.returncode == 0 and lines else (done.stdout + done.stderr)[-4000:]
    return {"check": path.stem, "passed": done.returncode == 0, "detail": detail}
