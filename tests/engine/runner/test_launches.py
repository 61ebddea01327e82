"""A decode step of Qwen3-0.6B launches so many kernels, and no more: on few rows that is what it costs.

Counted in captures on the fake GPU (`fake_gpu_launches.py`); a new launch in a layer costs 28 and is seen here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source_tree import ROOT

pytest.importorskip("triton", reason="triton is not installed")

LAYERS, SECONDS = 28, 280
# Of each layer.
FUSED = {"_few_heads": 1, "_attend": 1, "_few_rows": 3}
PLAIN = {"_rms_norm": 2, "_place_heads": 1, "_attend": 1, "_join": 1}
# Of a step: inputs, lists of splits, embedding, last norm, head, sampler (7), outputs to their place.
STEP = {"_decode_inputs": 1, "list_items": 1, "embedding": 1, "_rms_norm": 1, "linear": 1}
STEP |= {"_summarize": 1, "select": 4, "_finish": 2, "clamp": 1, "index_put_": 1, "copy_": 2}


def wanted(size: int, of_layer: dict[str, int]) -> dict[str, int]:
    """The launches of a step: `of_layer` in each, and those beside."""
    names = {**STEP, **({"find_neighbours": 1} if size > 1 else {})}
    return {name: names.get(name, 0) + LAYERS * of_layer.get(name, 0) for name in {*names, *of_layer}}


def counted(folder: Path, *options: str) -> dict[int, dict[str, int]]:
    """The launches of each size, in a process of its own."""
    command = [sys.executable, "-m", "tests.engine.runner.fake_gpu_launches", str(folder), *options]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["size"]: row["launches"] for row in rows}


def test_a_step_of_few_rows_launches_five_kernels_a_layer(tmp_path: Path) -> None:
    found = counted(tmp_path)
    assert [sum(launches.values()) for launches in found.values()] == [156, 157, 157, 297]
    for size in (1, 8, 64):
        assert found[size] == wanted(size, FUSED)
    assert found[256] == wanted(256, {**PLAIN, "_gated": 1, "linear": 4})


def test_without_fused_decodes_each_part_is_a_kernel_of_its_own(tmp_path: Path) -> None:
    found = counted(tmp_path, "fused_decodes=0")
    for size in (1, 8):
        assert found[size] == wanted(size, {**PLAIN, "_few_rows": 4})
    assert found[64] == wanted(64, {**PLAIN, "_few_rows": 3, "linear": 1})
