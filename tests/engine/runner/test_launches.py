"""A decode step of Qwen3-0.6B launches so many kernels, and no more.

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
# Of each layer, besides products and gate.
LAYER = {"_rms_norm": 2, "_place_heads": 1, "_attend": 1, "join_splits": 1}
# Products of few rows are this project's, with the gate inside; more rows, and wide outputs, are the library's.
PRODUCTS = {
    1: {"_few_rows": 4},
    8: {"_few_rows": 4},
    64: {"_few_rows": 3, "linear": 1},
    256: {"linear": 4, "_gated": 1},
}
# Of a step: inputs, lists of splits, embedding, last norm, head, sampler (7), outputs to their place.
STEP = {"_decode_inputs": 1, "list_items": 1, "embedding": 1, "_rms_norm": 1, "linear": 1}
STEP |= {"_summarize": 1, "select": 4, "_finish": 2, "clamp": 1, "index_put_": 1, "copy_": 2}


def wanted(size: int) -> dict[str, int]:
    """Return the launches of a step, by name."""
    step = {**STEP, **({"find_neighbours": 1} if size > 1 else {})}
    layer = {**LAYER, **PRODUCTS[size]}
    return {name: step.get(name, 0) + LAYERS * layer.get(name, 0) for name in {*step, *layer}}


def test_a_decode_step_launches_nine_kernels_a_layer_and_seventeen_more(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.engine.runner.fake_gpu_launches", str(tmp_path)]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = {row["size"]: row["launches"] for row in map(json.loads, done.stdout.splitlines())}
    assert found == {size: wanted(size) for size in PRODUCTS}
    assert [sum(launches.values()) for launches in found.values()] == [268, 269, 269, 297]
