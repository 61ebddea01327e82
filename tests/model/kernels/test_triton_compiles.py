"""Without a GPU, too, every kernel compiles to the machine code of one: what the interpreter lets pass ends here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source_tree import ROOT

pytest.importorskip("triton", reason="triton is not installed")


# Triton names what it keeps by what it was made of: only kernels that have changed are compiled again.
KEPT = ROOT / "build" / "kernels"


def test_every_kernel_compiles_for_a_gpu_that_need_not_be_there() -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(KEPT), "PYTHONPATH": path}
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
    assert len(rows) == 50
    # A multiprocessor of capability 9.0 has 227 KiB for a program.
    assert all(int(code) > 1000 and int(shared) <= 227 << 10 for _, _, _, code, shared, *_ in rows)
    attention = [row for row in rows if row[2] == "_attend"]
    prompts, decodes = attention[:2], attention[2:]
    assert [row[5] for row in attention] == ["wgmma", "wgmma", *["mma.sync"] * 5]
    # A row of a single token and one of a large tile: the same instructions, and no row's columns parted among warps.
    assert [row[6] for row in prompts] == ["8x1:16x128x16+16x64x16", "4x1:16x128x16+16x64x16"]
    # Keys and values of the next turns are on their way while a turn computes; three programs to a multiprocessor.
    assert all(int(row[7]) >= 2 for row in attention)
    # With eight drafts of two heads each, two.
    assert all(count * (int(row[4]) + 1024) <= 228 << 10 for row, count in zip(decodes, (3, 3, 3, 2, 3), strict=True))
    # 64 scores of a thread, and the two factors of its rows: both products go on while they are weighed.
    assert [(*row[5:7], row[9]) for row in rows if row[2] == "_attend_prompts"] == [
        ("wgmma", "4x1:16x128x16", "66"),
    ]
    # These begin while the kernel in front ends; only weights, which no kernel writes, are read before it has.
    ahead = {row[2]: row[8] for row in rows if row[8] != "-"}
    assert int(ahead.pop("_rms_norm")) > 0
    others = ("_gated", "_layer_norm", "_gelu", "_place_heads", "_quantize", "_few_rows")
    recurrent = ("_short_conv", "_delta_rule", "_state_space", "_gated_norm", "_sigmoid_gate")
    assert ahead == dict.fromkeys((*others, *recurrent), "0")
