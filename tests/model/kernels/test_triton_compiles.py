"""Without a GPU, too, every kernel compiles to the machine code of one: what the interpreter lets pass ends here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source_tree import ROOT

pytest.importorskip("triton", reason="triton is not installed")

from tokenmill.model.kernels.triton import matmul

# Triton names what it keeps by what it was made of: only kernels that have changed are compiled again.
KEPT = ROOT / "build" / "kernels"
# The most registers of a thread, by kernel, with room for another version of triton; more leave fewer programs to a
# multiprocessor, or spill.
REGISTERS = {
    "_attend": 240,
    "_attend_prompts": 168,
    "join_splits": 104,
    "find_neighbours": 48,
    "list_items": 72,
    "_rms_norm": 56,
    "_layer_norm": 48,
    "_few_rows": 136,
    "_place_heads": 224,
    "_gated": 40,
    "_gelu": 32,
    "_quantize": 56,
    "_multiply": 255,
    "_shrink": 64,
    "_expand": 40,
    "_decode_inputs": 40,
    "_window_inputs": 40,
    "_place_pairs": 136,
    "_sum_experts": 40,
    "_sum_ranks": 64,
    "_short_conv": 112,
    "_delta_rule": 176,
    "_state_space": 176,
    "_gated_norm": 72,
    "_sigmoid_gate": 32,
    "_summarize": 64,
    "select": 128,
    "_finish": 255,
}
# The search of one program through a row, and a kernel whose warps have tasks of their own: the assembler gives both
# some stack.
SPILLS = {"_finish": 8, "_attend_prompts": 8}


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
    assert len(rows) == 59
    # A multiprocessor of capability 9.0 has 227 KiB for a program.
    assert all(int(code) > 1000 and int(shared) <= 227 << 10 for _, _, _, code, shared, *_ in rows)
    attention = [row for row in rows if row[2] == "_attend"]
    prompts, decodes = attention[:2], attention[2:]
    assert [row[5] for row in attention] == ["wgmma", "wgmma", *["mma.sync"] * 6]
    # A row of a single token and one of a large tile: the same instructions, and no row's columns parted among warps.
    assert [row[6] for row in prompts] == ["8x1:16x128x16+16x64x16", "4x1:16x128x16+16x64x16"]
    # Keys and values of the next turns are on their way while a turn computes; three programs to a multiprocessor.
    assert all(int(row[7]) >= 2 for row in attention)
    # With eight drafts of two heads each, two.
    for row, count in zip(decodes, (3, 3, 3, 2, 3, 3), strict=True):
        assert count * (int(row[4]) + 1024) <= 228 << 10
        assert count * 128 * -(-int(row[9]) // 8) * 8 <= 65536, f"{count} programs of {row[9]} registers"
    # By weights as they are, in mxfp4, widened and with rounded rows. Those that are widened stay in registers, where
    # `mma.sync` takes them, behind three turns of copies; four programs to a multiprocessor, and two of rounded rows.
    products = [row for row in rows if row[2] == "_multiply"]
    assert [row[5] for row in products] == ["wgmma", "wgmma", "mma.sync", "wgmma"]
    for row, tiling, count in zip(products[2:], (matmul.WIDENING, matmul.ROUNDED), (4, 2), strict=True):
        assert int(row[7]) == 2 * (tiling.stages - 2)
        assert count * (int(row[4]) + 1024) <= 228 << 10
        assert count * 32 * tiling.warps * -(-int(row[9]) // 8) * 8 <= 65536, f"{count} programs of {row[9]} registers"
    for row in rows:
        assert int(row[9]) <= REGISTERS[row[2]], f"{row[2]} takes {row[9]} registers"
        assert int(row[10]) <= SPILLS.get(row[2], 0), f"{row[2]} spills {row[10]} bytes"
    # Decodes ask for their first keys when page ids and queries have come, in their loop when page ids have.
    most = {"unsplit": 4, "windows": 3, "drafts": 2, "many drafts": 2, "shared": 1, "pages": 4}
    for row, (name, count) in zip(decodes, most.items(), strict=True):
        assert int(row[12]) <= count, f"{name}: waits for {row[12]} loads before its first keys"
        assert int(row[13]) <= 2, f"{name}: waits for {row[13]} loads in a tile"
    # 64 scores of a thread, and the two factors of its rows: both products go on while they are weighed.
    assert [(*row[5:7], row[11]) for row in rows if row[2] == "_attend_prompts"] == [
        ("wgmma", "4x1:16x128x16", "66"),
    ]
    # These begin while the kernel in front ends; only weights, which no kernel writes, are read before it has.
    ahead = {row[2] for row in rows if row[8] not in ("-", "0")}
    assert ahead == {"_rms_norm", "_place_heads"}
    behind = {row[2] for row in rows if row[8] == "-"}
    of_experts = {"_place_pairs", "_sum_experts"}
    inputs = {"_decode_inputs", "_window_inputs"}
    others = {"_attend_prompts", "_multiply", "_shrink", "_expand", "_summarize", "select", "_finish"}
    assert behind == others | inputs | of_experts
