"""The values of GGUF tensors: floats, or blocks of small integers with scales that kernels may keep as they are."""

from __future__ import annotations

import math
import re

import numpy as np

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.quantization.packed import Mxfp4Rows, PackedFormat, PackedFormats, QuantizedRows, Rows
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.weights.gguf.blocks import LAYOUTS, Bytes
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
    unit_bytes, decode = LAYOUTS[tensor.kind]
    bits, values, scales, offsets = decode(data.reshape(-1, unit_bytes))
    num_rows = values.size // in_size
    return QuantizedRows(
        bits,
        values.reshape(num_rows, in_size),
        scales.astype(np.float32, copy=False).reshape(num_rows, -1),
        None if offsets is None else offsets.astype(np.float32, copy=False).reshape(num_rows, -1),
    )


def _mxfp4(blocks: Bytes) -> Mxfp4Rows:
    """Read blocks of 32 values: their exponent, 16 bytes; the low nibbles are the first half."""
    codes = np.concatenate((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return Mxfp4Rows(pairs, np.ascontiguousarray(blocks[..., 0]))


# The types that a format keeps without rounding much, from the fewest bits on.
FORMATS = (
    (PackedFormat.INT4, {"Q4_0"}),
    (PackedFormat.INT4_OFFSET, {"Q4_0", "Q4_1", "Q4_K"}),
    (PackedFormat.INT8, set(LAYOUTS)),
)
LAYER_MATRIX = re.compile(
    r"blk\.\d+\.(attn_(q|k|v|qkv|gate|output)|ssm_out|ffn_(gate|up|down)(?P<experts>_exps)?)\.weight"
)
VOCABULARY = ("token_embd.weight", "output.weight")


def packed_formats(file: GgufFile) -> PackedFormats:
    """Return the formats that keep what a file stores."""
    kinds = {name: tensor.kind for name, tensor in file.tensors.items()}
    found = [(match, kinds[name]) for name in kinds if (match := LAYER_MATRIX.fullmatch(name))]
    experts = {kind for match, kind in found if match["experts"]}
    are_mxfp4 = experts == {"MXFP4"}
    layers = {kind for match, kind in found if not (are_mxfp4 and match["experts"])}
    vocabulary = {kinds[name] for name in VOCABULARY if name in kinds}
    return PackedFormats(_format(layers), _format(vocabulary), PackedFormat.MXFP4 if are_mxfp4 else None)


def _format(kinds: set[str]) -> PackedFormat:
    return next((chosen for chosen, fitting in FORMATS if kinds <= fitting), PackedFormat.BF16)
