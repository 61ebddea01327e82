"""What a config.json says of quantized weights: which form they are stored in, or why they cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill.errors import InvalidCheckpoint
from tokenmill.weights.forms import Awq, CompressedInts, CompressedPacked, Dense, Form, Gptq

SUPPORTED = "compressed-tensors (int-quantized, pack-quantized), gptq, awq"


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """How the quantized weights of a checkpoint are stored; what is left out of the quantization is stored as floats.

    Attributes:
        bits: of a weight; None: not quantized.
        is_symmetric: zero is the middle of the integers, in every group.
    """

    form: Form
    bits: int | None = None
    is_symmetric: bool = True


def read_quantization(config: dict[str, Any], source: str) -> StoredQuantization:
    """The `quantization_config` of a parsed config.json.

    Raises:
        InvalidCheckpoint: a method or a feature that is not supported; names the source and the field.
    """
    fields = config.get("quantization_config")
    if fields is None:
        return StoredQuantization(Dense())
    if not isinstance(fields, dict):
        raise InvalidCheckpoint(f"{source}: quantization_config must be an object")
    method = fields.get("quant_method")
    reader = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq}.get(str(method))
    if reader is None:
        raise _unsupported(source, f"quantization_config ({method})")
    return reader(fields, source)


def _gptq(fields: dict[str, Any], source: str) -> StoredQuantization:
    bits = _bits(fields.get("bits"), (4, 8), source)
    zero_shift = 0 if fields.get("checkpoint_format") == "gptq_v2" else 1
    return StoredQuantization(Gptq(bits, zero_shift), bits, fields.get("sym") is True)


def _awq(fields: dict[str, Any], source: str) -> StoredQuantization:
    if fields.get("version", "gemm") != "gemm":
        raise _unsupported(source, f"awq version {fields['version']!r}")
    bits = _bits(fields.get("bits"), (4,), source)
    return StoredQuantization(Awq(), bits, fields.get("zero_point") is False)


def _compressed(fields: dict[str, Any], source: str) -> StoredQuantization:
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise InvalidCheckpoint(f"{source}: quantization_config must have exactly one entry in config_groups")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or weights.get("type") != "int":
        raise _unsupported(source, "compressed-tensors with weights that are not integers")
    if weights.get("actorder") in ("group", True):
        raise _unsupported(source, f"compressed-tensors with actorder {weights['actorder']!r}")
    bits = _bits(weights.get("num_bits"), (4, 8), source)
    is_symmetric = weights.get("symmetric", True) is True
    if fields.get("format") == "pack-quantized":
        return StoredQuantization(CompressedPacked(bits), bits, is_symmetric)
    if fields.get("format") == "int-quantized" and bits == 8 and is_symmetric:
        return StoredQuantization(CompressedInts(), bits)
    raise _unsupported(source, f"compressed-tensors format {fields.get('format')!r}")


def _unsupported(source: str, what: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"{source}: {what} is not supported; supported: {SUPPORTED}")


def _bits(bits: Any, choices: tuple[int, ...], source: str) -> int:
    if bits not in choices:
        raise InvalidCheckpoint(f"{source}: weights of {bits} bits are not supported; supported: {choices}")
    return int(bits)
