"""A published model in float32 with its channels in another order, as a GGUF file that llama.cpp's quantizer takes.

Published files are quantized: their numbers lie on a grid of blocks, which a quantizer of the same kind keeps for
nothing. In another order of channels the model is the same function, with the same statistics, on nobody's grid.

llama.cpp's K types need rows of 256s, which these models do not have. With some channels and heads twice, at a part of
their size each, a model is the same function and wide enough.

    python -m benchmarks.peers.real_model NAME FOLDER [wide]
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tokenmill.model.weights.catalogue import CATALOGUE, locate

Floats = npt.NDArray[np.float32]
SEED = 0
# Inputs of a row come in so many, of a wide model.
UNIT = 256
WHOLE = "F32"
# Tensors by the axis that the residual stream is on: their inputs, their outputs, all that they have.
READS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "token_embd", "output")
WRITES = ("attn_output", "ffn_down")
NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "output_norm")
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.weight")


def write(source: Path, folder: Path, is_wide: bool = False) -> None:
    """Write F32.gguf of a GGUF file; `is_wide`: one whose rows hold whole blocks, of a model of the Llama family."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    heads, groups = (
        reader.fields[f"{architecture}.attention.{key}"].contents() for key in ("head_count", "head_count_kv")
    )
    tensors = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in reader.tensors}
    rng, changed = np.random.default_rng(SEED), dict[str, Any]()
    if is_wide:
        narrow, per_group = len(tensors["output_norm.weight"]), heads // groups
        tensors, groups = widened(tensors, heads, groups, rng)
        heads, width = per_group * groups, len(tensors["output_norm.weight"])
        epsilon = reader.fields[f"{architecture}.attention.layer_norm_rms_epsilon"].contents()
        fields = {"embedding_length": width, "attention.head_count": heads, "attention.head_count_kv": groups}
        fields["attention.layer_norm_rms_epsilon"] = epsilon * narrow / width
        changed = {f"{architecture}.{key}": value for key, value in fields.items()}
    writer = gguf.GGUFWriter(folder / f"{WHOLE}.gguf", architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _copy_fields(reader, writer, changed)
    for tensor, values in reordered(tensors, heads, groups, rng).items():
        writer.add_tensor(tensor, np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reordered(tensors: Mapping[str, Floats], heads: int, groups: int, rng: np.random.Generator) -> dict[str, Floats]:
    """Return the tensors of the same function with the channels of the residual stream, of feed-forward blocks and of
    the values of each head in a random order.

    Args:
        tensors: by llama.cpp's names; of a decoder with gated blocks.
        heads, groups: of queries, and of keys and values.
    """
    stream = rng.permutation(len(tensors["output_norm.weight"]))
    orders: dict[str, tuple[Any, Any]] = {}
    found = {}
    for name, values in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name} has no place here")
        layer, role = match.groups()
        if layer is not None and layer not in orders:
            size = len(tensors[f"blk.{layer}.attn_v.weight"]) // groups
            inside = np.stack([rng.permutation(size) for _ in range(groups)])
            orders[layer] = inside, rng.permutation(len(tensors[f"blk.{layer}.ffn_gate.weight"]))
        found[name] = _reordered(values, role, stream, *orders.get(layer or "", (None, None)), heads)
    return found


def widened(
    tensors: Mapping[str, Floats], heads: int, groups: int, rng: np.random.Generator
) -> tuple[dict[str, Floats], int]:
    """Return the tensors of the same function with channels and groups of heads repeated up to multiples of `UNIT`,
    and the number of groups.

    A channel that is there n times has 1 / sqrt(n) of its size each time, so that sums of squares stay; what norms
    divide by changes with the width. The outputs of n equal heads are added up with 1 / n each.
    """
    width, size = len(tensors["output_norm.weight"]), len(tensors["blk.0.attn_v.weight"]) // groups
    stream = _repeated(width, -(-width // UNIT) * UNIT, rng)
    per_unit = UNIT // math.gcd(UNIT, heads // groups * size)  # groups whose heads fill whole units
    picked = _repeated(groups, -(-groups // per_unit) * per_unit, rng)
    share = np.sqrt(1 / np.bincount(stream)[stream]).astype(np.float32)
    of_heads = 1 / np.repeat(np.bincount(picked)[picked], heads // groups * size).astype(np.float32)

    def rows(count: int) -> Any:
        """Places of the numbers of the picked groups, each of which has so many."""
        return (picked[:, None] * count + np.arange(count)).ravel()

    def channels(role: str, values: Floats) -> Floats:
        if role in READS:
            return values[:, stream] * share
        if role in WRITES:
            return values[stream] * share[:, None]
        return values[stream] * np.float32(math.sqrt(width / len(stream))) if role in NORMS else values

    found = {}
    for name, values in tensors.items():
        role = name.removesuffix(".weight").rpartition(".")[2]
        wide = channels(role, values)
        if role in ("attn_q", "attn_k", "attn_v"):
            wide = wide[rows(len(wide) // groups)]
        found[name] = wide[:, rows(len(of_heads) // len(picked))] * of_heads if role == "attn_output" else wide
    return found, len(picked)


def _repeated(count: int, wanted: int, rng: np.random.Generator) -> Any:
    """Return all numbers below `count`, and then some of them again, as evenly as can be, `wanted` in all."""
    rounds = [rng.permutation(count) for _ in range(-(-wanted // count))]
    return np.concatenate(rounds)[:wanted]


def _reordered(values: Floats, role: str, stream: Any, inside: Any, hidden: Any, heads: int) -> Floats:
    if role in READS:
        values = values[:, stream]
    elif role in (*WRITES, *NORMS):
        values = values[stream]
    if role in ("ffn_gate", "ffn_up"):
        return values[hidden]
    if role == "ffn_down":
        return values[:, hidden]
    if role == "attn_v":
        return values[_places(inside)]
    return values[:, _places(np.repeat(inside, heads // len(inside), 0))] if role == "attn_output" else values


def _places(inside: Any) -> Any:
    """Return the channels of heads [heads, channels of one], each in its own order, as one list."""
    return (inside + inside.shape[1] * np.arange(len(inside))[:, None]).ravel()


def _copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, changed: Mapping[str, Any]) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind, *inner = field.types
        value = changed.get(field.name, field.contents())
        writer.add_key_value(field.name, value, kind, inner[-1] if inner else None)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as parts:  # where a model comes in pieces
        write(Path(locate(CATALOGUE[sys.argv[1]], Path(parts))), Path(sys.argv[2]), sys.argv[3:] == ["wide"])
