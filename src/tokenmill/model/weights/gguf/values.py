"""The values of GGUF tensors: floats, or blocks of small integers with scales that kernels may keep as they are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.models.families import FAMILIES
from tokenmill.model.quantization.blocks import LAYOUTS, Bytes
from tokenmill.model.quantization.packed import (
    BLOCK_FORMATS,
    UNQUANTIZED,
    BlockRows,
    Mxfp4Rows,
    PackedFormat,
    PackedFormats,
    Rows,
)
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.weights.gguf.config import ARCHITECTURES
from tokenmill.model.weights.gguf.file import GgufFile, GgufTensor

# The same names as those of safetensors.
FLOATS = ("F32", "F16", "BF16")


def read_rows(tensor: GgufTensor) -> Rows:
    """Read a tensor [..., in_size] as rows, its leading dimensions flattened; a vector stays one.

    Raises:
        InvalidCheckpoint: the type is not supported.
    """
    data, in_size = tensor.data(), tensor.shape[-1]
    if tensor.kind in FLOATS:
        shape = tensor.shape if len(tensor.shape) == 1 else (math.prod(tensor.shape[:-1]), in_size)
        return StoredArray.of_bytes(data, tensor.kind, shape)
    if tensor.kind == "MXFP4":
        return _mxfp4(data.reshape(-1, in_size // 32, 17))
    if tensor.kind not in LAYOUTS:
        raise InvalidCheckpoint(
            f"{tensor.file}: tensor {tensor.name} has type {tensor.kind}, which is not supported; supported: "
            f"{', '.join((*FLOATS, *LAYOUTS, 'MXFP4'))}"
        )
    rows = BlockRows(tensor.kind, in_size, data.reshape(tensor.num_rows, -1))
    return rows if tensor.kind in BLOCK_FORMATS else rows.unpacked()


def _mxfp4(blocks: Bytes) -> Mxfp4Rows:
    """Read blocks of 32 values: their exponent, 16 bytes; the low nibbles are the first half."""
    codes = np.concatenate((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return Mxfp4Rows(pairs, np.ascontiguousarray(blocks[..., 0]))


# The types that a format keeps without rounding much, from the fewest bits on.
FORMATS = (
    (PackedFormat.INT4, {"Q4_0"}),
    (PackedFormat.INT4_OFFSET, {"Q4_0", "Q4_1", "Q4_K"}),
    (PackedFormat.INT5, {"Q5_0"}),
    (PackedFormat.INT5_OFFSET, {"Q4_0", "Q4_1", "Q5_0", "Q5_1"}),
    (PackedFormat.INT8, set(LAYOUTS)),
)
# Types with a format that takes nothing else.
OWN_FORMATS: Mapping[str, PackedFormat] = MappingProxyType({**BLOCK_FORMATS, "MXFP4": PackedFormat.MXFP4})
LAYER_MATRIX = re.compile(
    r"blk\.\d+\.(attn_(q|k|v|qkv|gate|output)|ssm_out|ffn_(gate|up|gate_up|down)(?P<experts>_exps)?)\.weight"
)
VOCABULARY = ("token_embd.weight", "output.weight")
# The roles of matrices that have each its own format; of those side by side the halves of a gated product share one.
ROLES = ("q", "k", "v", "output", "down", "expert_down")
PAIRS = (("gate", "up"), ("expert_gate", "expert_up"))


def packed_formats(file: GgufFile) -> PackedFormats:
    """Return the formats that keep what a file stores: of all layers together, and of each projection by its role."""
    kinds = {name: tensor.kind for name, tensor in file.tensors.items()}
    found = [(match, kinds[name]) for name in kinds if (match := LAYER_MATRIX.fullmatch(name))]
    are_mxfp4 = {kind for match, kind in found if match["experts"]} == {"MXFP4"}
    layers = {kind for match, kind in found if not (are_mxfp4 and match["experts"])}
    vocabulary = {kinds[name] for name in VOCABULARY if name in kinds}
    if layers | vocabulary <= set(FLOATS) and not are_mxfp4:
        return UNQUANTIZED
    whole = PackedFormats(_rounded(layers), _rounded(vocabulary), PackedFormat.MXFP4 if are_mxfp4 else None)
    family = ARCHITECTURES.get(str(file.metadata.get("general.architecture")))
    table = None if family is None else FAMILIES[family].gguf
    count = 1 + max((int(match[0].split(".")[1]) for match, _ in found), default=-1)
    if table is None or not count:
        return whole
    names = table.in_file(kinds).names
    by_layer = tuple(msgspec.structs.replace(whole, parts=_parts(kinds, names, layer)) for layer in range(count))
    outside = ((role, kinds.get(name, "")) for role, name in zip(("embedding", "head"), VOCABULARY, strict=True))
    parts = tuple((role, _format({kind})) for role, kind in outside if kind)
    return msgspec.structs.replace(whole, by_layer=by_layer, parts=parts)


def _format(kinds: set[str]) -> PackedFormat:
    """Return the format that keeps matrices of these types."""
    own = {OWN_FORMATS.get(kind) for kind in kinds}
    return own.pop() or _rounded(kinds) if len(own) == 1 else _rounded(kinds)


def _rounded(kinds: set[str]) -> PackedFormat:
    """Return a format that also takes floats."""
    return next((chosen for chosen, fitting in FORMATS if kinds <= fitting), PackedFormat.BF16)


def _parts(kinds: Mapping[str, str], names: Mapping[str, str], layer: int) -> tuple[tuple[str, PackedFormat], ...]:
    """Return the formats of a layer's projections by role."""
    found: list[tuple[str, PackedFormat]] = []
    for roles in (*((role,) for role in ROLES), *PAIRS):
        tensors = [f"{names[role].format(layer=layer)}.weight" for role in roles if role in names]
        own = {kinds[name] for name in tensors if name in kinds}
        if own:
            found += [(role, _format(own)) for role in roles]
    return tuple(found)
