"""The values of GGUF tensors: blocks of small integers with scales, as llama.cpp lays them out (ggml-common.h).

The types that the kernels can use keep their integers; every other type that the gguf package knows is spelled out.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.quantization.packed import Mxfp4Rows, PackedFormat, PackedFormats, QuantizedRows, Rows
from tokenmill.model.weights.gguf.file import GgufFile, GgufTensor

Bytes = npt.NDArray[np.uint8]
Parts = tuple[int, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any] | None]
"""bits, values [blocks, n], scales [blocks, groups], offsets [blocks, groups]."""

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_rows(tensor: GgufTensor) -> Rows:
    """Read a tensor [..., in_size] as rows, its leading dimensions flattened; a vector stays one.

    Raises:
        InvalidCheckpoint: the gguf package cannot read the type.
    """
    data, in_size = tensor.data(), tensor.shape[-1]
    if tensor.kind in FLOATS:
        values = torch.from_numpy(np.array(data)).view(FLOATS[tensor.kind])
        return values if len(tensor.shape) == 1 else values.view(-1, in_size)
    if tensor.kind == "MXFP4":
        return _mxfp4(data.reshape(-1, in_size // 32, 17))
    if tensor.kind not in LAYOUTS:
        return _spelled_out(tensor, data)
    unit_bytes, decode = LAYOUTS[tensor.kind]
    bits, values, scales, offsets = decode(data.reshape(-1, unit_bytes))
    num_rows = values.size // in_size
    return QuantizedRows(
        bits,
        torch.from_numpy(values.reshape(num_rows, in_size)),
        torch.from_numpy(scales.astype(np.float32).reshape(num_rows, -1)),
        None if offsets is None else torch.from_numpy(offsets.astype(np.float32).reshape(num_rows, -1)),
    )


def _spelled_out(tensor: GgufTensor, data: Bytes) -> torch.Tensor:
    from gguf import GGMLQuantizationType, quant_shape_to_byte_shape, quants

    try:
        kind = GGMLQuantizationType[tensor.kind]
        stored = data.reshape(quant_shape_to_byte_shape(tensor.shape, kind))
        return torch.from_numpy(quants.dequantize(stored, kind)).view(-1, tensor.shape[-1])
    except (NotImplementedError, ValueError) as error:
        raise InvalidCheckpoint(
            f"{tensor.file}: tensor {tensor.name} has type {tensor.kind}, which is not supported"
        ) from error


def _half(data: Bytes) -> npt.NDArray[np.float32]:
    """Read [blocks, 2 * n] bytes of float16 as [blocks, n]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _mxfp4(blocks: Bytes) -> Mxfp4Rows:
    """Read blocks of 32 values: their exponent, 16 bytes; the low nibbles are the first half."""
    codes = np.concatenate((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    return Mxfp4Rows(torch.from_numpy(pairs), torch.from_numpy(np.ascontiguousarray(blocks[..., 0])))


def _q8_0(units: Bytes) -> Parts:
    """Read blocks of 32 values: scale, 32 int8."""
    return 8, np.ascontiguousarray(units[:, 2:]).view(np.int8), _half(units[:, :2]), None


def _q4_0(units: Bytes) -> Parts:
    """Read blocks of 32 values: scale, 16 bytes; the low nibbles are the first half, and 8 is zero."""
    scales, packed = _half(units[:, :2]), units[:, 2:]
    return 4, np.concatenate((packed & 15, packed >> 4), 1), scales, -8 * scales


def _q4_k(units: Bytes) -> Parts:
    """Read blocks of 256 values in 8 groups: two scales, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles."""
    scale, minimum, packed = _half(units[:, :2]), _half(units[:, 2:4]), units[:, 4:16]
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), 1)
    minima = np.concatenate((middle & 63, (high >> 4) | (middle >> 6 << 4)), 1)
    # Each run of 32 bytes holds two groups: low nibbles, then high ones.
    runs = units[:, 16:].reshape(-1, 4, 32)
    values = np.stack((runs & 15, runs >> 4), 2).reshape(-1, 256)
    return 4, values, scale * scales, -minimum * minima


def _q6_k(units: Bytes) -> Parts:
    """Read blocks of 256 values in 16 groups: 128 bytes of low nibbles, 64 of high bits, 16 int8 scales, a scale."""
    low, high = units[:, :128].reshape(-1, 2, 2, 32), units[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.concatenate((low & 15, low >> 4), 2)
    bits = (high >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)) & 3
    values = (nibbles | bits << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(units[:, 192:208]).view(np.int8) * _half(units[:, 208:])
    return 8, values.reshape(-1, 256), scales, None


# Type -> bytes of a block, and how it is read.
LAYOUTS = {"Q8_0": (34, _q8_0), "Q4_0": (18, _q4_0), "Q4_K": (144, _q4_k), "Q6_K": (210, _q6_k)}
# The types that a format keeps without rounding much, from the fewest bits on.
FORMATS = (
    (PackedFormat.INT4, {"Q4_0"}),
    (PackedFormat.INT4_OFFSET, {"Q4_0", "Q4_1", "Q4_K"}),
    (PackedFormat.INT8, {"Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "Q3_K", "Q2_K"}),
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
