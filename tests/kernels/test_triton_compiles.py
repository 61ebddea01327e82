"""Without a GPU, too, every kernel compiles to the machine code of one: what the interpreter lets pass ends here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source_tree import ROOT

pytest.importorskip("triton", reason="triton is not installed")


def test_every_kernel_compiles_for_a_gpu_that_need_not_be_there(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py")), "90"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) == 10
    # A multiprocessor of capability 9.0 has 227 KiB for a program; attention to prompts uses its matrix units.
    assert all(int(code) > 1000 and int(shared) <= 227 << 10 for *_, code, shared, _, _ in rows)
    assert [units for *_, name, _, _, units, _ in rows if name == "_attend"] == ["wgmma", "mma.sync"]
    # These begin while the kernel in front ends; only weights, which no kernel writes, are read before it has.
    ahead = {name: loads for *_, name, _, _, _, loads in rows if loads != "-"}
    assert int(ahead.pop("_rms_norm")) > 0
    assert ahead == {"_silu_and_mul": "0", "_place_heads": "0", "_quantize": "0"}
