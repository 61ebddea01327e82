"""Compile every kernel to machine code for GPUs that need not be there; prints what each one takes.

    TRITON_INTERPRET=0 python tests/model/kernels/compile_kernels.py 90
    TRITON_INTERPRET=0 python tests/model/kernels/compile_kernels.py 80,89,90,100 --types bf16,fp32

A line each: capability, type, kernel, bytes of code, bytes of shared memory, matrix units, how warps share a tile and
the shapes of their instructions, most groups of copies left open at a wait, the loads that a program issues before it
waits for the kernels in front (`-`: it is launched behind their end), registers of a thread, bytes that it spills, the
fewest exponentials of a loop between the waits for one product and for the next (`-`: it waits for both at once), and
the loads that a loop's turn waits for one after the other: before its first copy, and between copies (`-`: no copies).
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tests.model.kernels.machine_code import (
    hidden_exponentials,
    layout_of,
    loads_ahead,
    open_copies,
    registers_of,
    units_of,
    waits_for_loads,
)
from tokenmill.model.kernels.triton import (
    adapters,
    all_reduce,
    attention,
    decode_inputs,
    experts,
    few_rows,
    fp8,
    gate,
    heads,
    hopper,
    join,
    matmul,
    norm,
    recurrence,
    split_lists,
    splits,
)
from tokenmill.model.sampling import triton_draw, triton_select

# Types of the arguments by their names, the same in all kernels.
ACTIVATIONS = (
    *("x", "delta", "weight", "bias", "sinks", "output", "gate_up", "qkv", "q_norm", "k_norm"),
    *("cos_table", "sin_table", "q", "keys", "values", "logits", "a", "b", "y"),
    *("gate", "before", "mixed", "gates", "steps", "a_log", "dt_bias", "skip", "outer"),
)
POINTERS = {
    **dict.fromkeys(("parts", "scales", "inner", "memory", "weights", "factors", "row_scales"), "*fp32"),
    **dict.fromkeys(("page_table", "query_starts", "context_lens", "starts", "stops", "records", "counters"), "*i32"),
    **dict.fromkeys(("shared", "part_stops", "part_records", "members", "order", "groups"), "*i32"),
    **dict.fromkeys(("pages", "tokens", "lens", "slot_of_row", "sights"), "*i32"),
    **dict.fromkeys(("positions", "slots", "sources", "integers", "token_ids", "lists", "turns", "addresses"), "*i64"),
    **dict.fromkeys(("rows", "ends", "places", "experts"), "*i64"),
    **dict.fromkeys(("numbers", "summaries", "sums"), "*fp64"),
    "rounded": "*u8",
}
RECURRENT_STRIDES = ("x_stride", "gate_stride", "mixed_stride", "gates_stride", "steps_stride", "state_stride")
NUMBERS = {
    **dict.fromkeys(("eps", "scale"), "fp32"),
    **dict.fromkeys(
        (
            "num_requests",
            "q_stride",
            "table_stride",
            "num_groups",
            "num_rows",
            "by_row",
            "stride",
            "size",
            "window",
            "after",
            "reach",
            "num_pages",
            "num_tokens",
            "num_work",
            "num_pairs",
            "num_experts",
            "count",
            "rank",
            "ranks",
            "second",
            "third",
            *RECURRENT_STRIDES,
            "COUNT",
            "SIZE",
            "DEPTH",
        ),
        "i32",
    ),
}
# Of numbers that are multiples of 16 in most models.
EVEN = ("q_stride", "stride", "size", "SIZE", "DEPTH", *RECURRENT_STRIDES)
PART = 128 + attention.PART_EXTRA
ATTENTION = {
    "PAGE_SIZE": 16,
    "NUM_KV_HEADS": 8,
    "GROUP": 2,
    "HEAD_DIM": 128,
    "WIDTH": 128,
    "TILE": attention.TILE_KEYS,
    "SPLIT": attention.SPLIT_KEYS,
    "LEVEL": attention.LEVEL_SPLITS,
    "PART": PART,
    "SHARES": False,
    "HAS_SINKS": False,
    "HAS_SIGHTS": False,
    "HEADS_FIRST": True,
}
GROUPED = {"COLUMNS": 1024, "DEPTH": 1024, "GROUPED": True, "HAS_SOURCES": True, "HAS_BIAS": False}
# Grouped products by weights in the type of activations, in mxfp4, and in eight-bit floats of both kinds.
FORMS = [
    (matmul.TILING, {}),
    (matmul.TILING, {"IS_FP4": True}),
    (matmul.WIDENING, {"IS_FP8": True}),
    (matmul.ROUNDED, {"IS_FP8": True, "ARE_ROUNDED": True}),
]
PRODUCTS = [
    (
        one,
        {
            "ROWS_TILE": one.rows,
            "COLUMNS_TILE": one.columns,
            "DEPTH_TILE": one.depth,
            **{name: form.get(name, False) for name in ("IS_FP4", "IS_FP8", "ARE_ROUNDED")},
            **GROUPED,
        },
    )
    for one, form in FORMS
]
CHUNKS = {"CHUNK": triton_draw.CHUNK, "CHUNKS": 64}
HEADS = {"TILE": heads.HEADS_TILE, "HAS_NORMS": True, "NORMS_VALUES": False, "ARE_OFFSETS": False, "ROTATES": True}
OFFSETS = {**HEADS, "ARE_OFFSETS": True}
VALUES = {**HEADS, "NORMS_VALUES": True}
# Of prompts and of single tokens: half precision multiplies on matrix units, float32 by rows. Constants, warps.
PROMPTS = {
    "bf16": [
        ({"TILE_TOKENS": 64, "ROWS": attention.PROMPT_ROWS, "ALL_MASKED": 0}, 8),
        ({"TILE_TOKENS": 1, "ROWS": attention.SINGLE_ROWS, "ALL_MASKED": 0}, 4),
    ],
    "fp32": [
        ({"TILE_TOKENS": 8, "ROWS": attention.DECODE_ROWS, "ALL_MASKED": 1}, 4),
    ],
}
HOPPER = {
    **ATTENTION,
    "TILE_TOKENS": 64,
    "TILE": hopper.TILE_ROWS,
    "HAS_WINDOW": False,
}
HOPPER = {name: value for name, value in HOPPER.items() if name in hopper._attend_prompts.arg_names}
COPIED = f"tensordesc<bf16[16, {hopper.COPY_WIDTH}],{hopper.LAYOUT!r}>"
# As `num_stages` has it for heads of 128.
ATTENTION_STAGES = {"bf16": 3, "fp32": 2}
DECODES = {**ATTENTION, "TILE_TOKENS": 1, "ROWS": attention.DECODE_ROWS, "ALL_MASKED": 1}
# Decodes with four and with eight drafts, those that share pages, and those whose splits are pages.
WHOLE = {"PAGE_SIZE": splits.SPLIT_KEYS, "LEVEL": splits.ALL_ALIKE}
DRAFTED = ({"TILE_TOKENS": 5, "ROWS": 16}, {"TILE_TOKENS": 9, "ROWS": 32}, {"SHARES": True}, WHOLE)
# Products of few rows, plain and with a gate, by a weight in bfloat16 and in eight-bit floats.
FEW = [
    (tiling, {"ROWS": tiling.rows, "COLUMNS": tiling.columns, "TILE": tiling.depth, "GATE": kind, "HAS_SCALES": is_fp8})
    for is_fp8 in (False, True)
    for num_rows in (1, few_rows.MOST_ROWS)
    for kind in (-1, 0)
    for tiling in [few_rows.tiling_for(1024, num_rows, kind >= 0, is_fp8)]
]
LEAST_FP8_CAPABILITY = 89
NORMS = (
    {"ROUNDS": False, "IS_OFFSET": False},
    {"ROUNDS": True, "IS_OFFSET": False},
    {"ROUNDS": False, "IS_OFFSET": True},
)
SUMS = {"SIZE": 1 << 20, "BLOCK": all_reduce.BLOCK_BYTES // 2, "LOOKS": all_reduce.LOOKS}
JOIN = {"HEADS": 16, "HEAD_DIM": 128, "WIDTH": 128, "PART": PART, "BLOCK": 16, "TOKENS": 5}
LISTS = {"WIDTH": splits.MOST_CAPTURED, "SPLIT": splits.SPLIT_KEYS, "LEVEL": splits.LEVEL_SPLITS}
LISTS["LEVELS"] = splits.LEVELS
CONV = {"KEEPS": True, "CHANNELS": 8192, "TAPS": 4, "HAS_BIAS": False, "SILU": True}
DELTA = {
    "KEEPS": True,
    "KEY_HEADS": 16,
    "HEADS": 32,
    "KEY_SIZE": 128,
    "VALUE_SIZE": 128,
    "ROWS": 128,
    "BLOCK": recurrence.COLUMNS,
}
SPACE = {
    "KEEPS": True,
    "GROUPS": 1,
    "HEADS": 48,
    "SIZE": 64,
    "STATE_SIZE": 128,
    "ROWS": 128,
    "BLOCK": recurrence.COLUMNS,
}
GATED_NORM = {"HEADS": 32, "SIZE": 128, "WIDTH": 128, "TILE": recurrence.HEADS_TILE}
# Kernel, constants, warps.
CASES: list[tuple[Any, dict[str, Any], int]] = [
    *((norm._rms_norm, {"SIZE": 1000, "WIDTH": 1024, "ADDS": True, **kind}, 2) for kind in NORMS),
    (norm._layer_norm, {"SIZE": 1000, "WIDTH": 1024, "ADDS": True}, 2),
    (gate._gelu, {"WIDTH": 1024}, 4),
    *((gate._gated, {"SIZE": 3072, "WIDTH": 1024, "GATE": kind}, 4) for kind in (0, 1, 2)),
    (heads._place_heads, {"NUM_HEADS": 16, "NUM_KV_HEADS": 8, "HALF": 64, "WIDTH": 64, **HEADS}, 1),
    (heads._place_heads, {"NUM_HEADS": 4, "NUM_KV_HEADS": 1, "HALF": 128, "WIDTH": 128, **OFFSETS}, 1),
    (heads._place_heads, {"NUM_HEADS": 8, "NUM_KV_HEADS": 1, "HALF": 256, "WIDTH": 256, **VALUES}, 1),
    *((attention._attend, {**DECODES, "HAS_WINDOW": has, "IS_SPLIT": has}, 4) for has in (False, True)),
    *((attention._attend, {**DECODES, **tile, "HAS_WINDOW": False, "IS_SPLIT": True}, 4) for tile in DRAFTED),
    *((join.join_splits, {**JOIN, "HAS_SINKS": has}, join.JOIN_WARPS) for has in (False, True)),
    (split_lists.find_neighbours, {**LISTS, "PAGE_SIZE": 16, "TOGETHER": 8}, 4),
    (split_lists.list_items, {**LISTS, "SHARES": True}, 4),
    (split_lists.list_items, {**LISTS, "LEVEL": splits.ALL_ALIKE, "LEVELS": 1, "SHARES": True}, 4),
    *((matmul._multiply, sizes, one.warps) for one, sizes in PRODUCTS),
    (experts._place_pairs, {"PAIRS": experts.PAIRS, "COMPARED": experts.COMPARED}, 4),
    (experts._sum_experts, {"SIZE": 2048, "COUNT": 8, "WIDTH": 8, "COLUMNS": experts.COLUMNS}, 4),
    *((few_rows._few_rows, {**sizes, "HAS_BIAS": True, "PREFETCHES": True}, one.warps) for one, sizes in FEW),
    (fp8._quantize, {"SIZE": 3000, "WIDTH": 4096}, 8),
    (adapters._shrink, {"RANKS": 16, "WIDTH": 256}, 4),
    (adapters._expand, {"PARTS": 3, "RANK": 16, "OUTPUTS": 64}, 4),
    (all_reduce._sum_ranks, {**SUMS, "RANKS": 2, "LANES": 4}, all_reduce.WARPS),
    (all_reduce._sum_ranks, {**SUMS, "RANKS": 8, "LANES": 16}, all_reduce.WARPS),
    (decode_inputs._window_inputs, {"PAGE_SIZE": 16, "WIDTH": 1024}, 4),
    (decode_inputs._decode_inputs, {"PAGE_SIZE": 16, "WIDTH": 1024}, 4),
    *((recurrence._short_conv, {**CONV, "TILE": tile, "BLOCK": block}, 4) for tile, block in ((1, 256), (16, 128))),
    (recurrence._delta_rule, DELTA, 1),
    (recurrence._state_space, SPACE, 1),
    (recurrence._gated_norm, GATED_NORM, 1),
    (recurrence._sigmoid_gate, {"SIZE": 4096, "WIDTH": 1024}, 4),
    (triton_draw._summarize, CHUNKS, 4),
    *((triton_select.select, {**CHUNKS, "TILE": triton_draw.TILE, "LEVEL": level}, 8) for level in range(4)),
    *((triton_draw._finish, {**CHUNKS, "IS_FILTERED": is_filtered}, 8) for is_filtered in (False, True)),
]


def is_fp8(constants: dict[str, Any]) -> bool:
    """Return whether a kernel's weights are eight-bit floats."""
    return bool(constants.get("HAS_SCALES") or constants.get("IS_FP8"))


def compile_one(kernel: Any, constants: dict[str, Any], warps: int, capability: int, dtype: str) -> Any:
    """A kernel with the types and alignments that a model of `dtype` gives its arguments."""
    pointers = {**POINTERS, **dict.fromkeys(ACTIVATIONS, f"*{dtype}")}
    if constants.get("IS_FP4"):
        pointers |= {"weight": "*u8", "factors": "*u8"}
    if is_fp8(constants):
        pointers["weight"] = "*fp8e4nv"
    if constants.get("ARE_ROUNDED"):
        pointers["x"] = "*fp8e4nv"
    if kernel in (few_rows._few_rows, matmul._multiply):
        constants = {**constants, "BY_BITS": dtype == "bf16"}
    if "PDL" in kernel.arg_names:
        constants = {**constants, "PDL": capability >= 90}
    types = {**pointers, **NUMBERS, **dict.fromkeys(constants, "constexpr")}
    names = kernel.arg_names
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if (name in pointers and not kernel.params[place].do_not_specialize_on_alignment)
        or (name in EVEN and name not in constants)
    }
    kind = ASTSource
    if kernel is hopper._attend_prompts:
        kind, types = GluonASTSource, {**types, "keys": COPIED, "values": COPIED}
        aligned = {place: value for place, value in aligned.items() if names[place[0]] not in ("keys", "values")}
    source = kind(kernel, {name: types[name] for name in names}, constants, aligned)
    options = {"num_warps": warps}
    if kernel is attention._attend:
        options["num_stages"] = ATTENTION_STAGES[dtype]
        if constants["IS_SPLIT"] and constants["ROWS"] == attention.DECODE_ROWS and dtype == "bf16":
            options["maxnreg"] = splits.SPLIT_REGISTERS
    if kernel is few_rows._few_rows:
        kinds = constants["GATE"] >= 0, constants["HAS_SCALES"]
        options["num_stages"] = few_rows.tiling_for(1024, constants["ROWS"], *kinds).stages
    if kernel is matmul._multiply:
        options["num_stages"] = next(one.stages for one, sizes in PRODUCTS if sizes.items() <= constants.items())
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    """Compile them all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("capabilities", help="with commas between: 80,90")
    parser.add_argument("--types", default="bf16", help="with commas between: bf16,fp32")
    options = parser.parse_args()
    for capability, dtype in product(map(int, options.capabilities.split(",")), options.types.split(",")):
        prompts = [
            (attention._attend, {**ATTENTION, **tiles, "HAS_WINDOW": False, "IS_SPLIT": False}, num_warps)
            for tiles, num_warps in PROMPTS[dtype]
        ]
        if capability == 90 and dtype == "bf16":
            prompts.append((hopper._attend_prompts, HOPPER, 4))
        for kernel, constants, warps in [*prompts, *CASES]:
            if is_fp8(constants) and (dtype != "bf16" or capability < LEAST_FP8_CAPABILITY):
                continue
            compiled = compile_one(kernel, constants, warps, capability, dtype)
            code, shared = len(compiled.asm["cubin"]), compiled.metadata.shared
            ptx, layout = compiled.asm["ptx"], layout_of(compiled.asm["ttgir"])
            found = units_of(ptx), layout, open_copies(ptx), loads_ahead(ptx), *registers_of(compiled)
            hidden, waits = hidden_exponentials(compiled), waits_for_loads(compiled)
            print(capability, dtype, kernel.__name__, code, shared, *found, hidden, *waits, flush=True)


if __name__ == "__main__":
    main()
