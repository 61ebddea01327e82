"""A published model in float32 with its channels in another order, as a GGUF file that llama.cpp's quantizer takes.

Published files are quantized: their numbers lie on a grid of blocks, which a quantizer of the same kind keeps for
nothing. In another order of channels the model is the same function, with the same statistics, on nobody's grid.

    python -m benchmarks.peers.real_model NAME FOLDER
"""

from __future__ import annotations

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
WHOLE = "F32"
# Tensors by the axis that the residual stream is on: their inputs, their outputs, all that they have.
READS = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "token_embd", "output")
WRITES = ("attn_output", "ffn_down")
NORMS = ("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "output_norm")
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.weight")


def write(source: Path, folder: Path) -> None:
    """Write F32.gguf of a GGUF file."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    heads, groups = (
        reader.fields[f"{architecture}.attention.{key}"].contents() for key in ("head_count", "head_count_kv")
    )
    tensors = {one.name: gguf.dequantize(one.data, one.tensor_type) for one in reader.tensors}
    writer = gguf.GGUFWriter(folder / f"{WHOLE}.gguf", architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _copy_fields(reader, writer)
    for tensor, values in reordered(tensors, heads, groups, np.random.default_rng(SEED)).items():
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


def _copy_fields(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind, *inner = field.types
        writer.add_key_value(field.name, field.contents(), kind, inner[-1] if inner else None)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as parts:  # where a model comes in pieces
        write(Path(locate(CATALOGUE[sys.argv[1]], Path(parts))), Path(sys.argv[2]))
