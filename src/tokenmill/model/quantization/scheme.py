"""Read the quantization that a config.json declares: layout and the formats that keep it, or why it is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.quantization.layouts import Awq, CompressedInts, CompressedPacked, Dense, Gptq, WeightLayout
from tokenmill.model.quantization.packed import UNQUANTIZED, PackedFormat, PackedFormats

SUPPORTED = "compressed-tensors (int-quantized, pack-quantized), gptq, awq, mxfp4"


class QuantizationScheme(msgspec.Struct, frozen=True):
    """The quantization of a checkpoint's weights; weights that a scheme leaves out are stored as floats.

    Attributes:
        formats: packed formats that keep the integers as they are, without a second rounding.
        method: its name in config.json, "none" for floats.
        claimed: a method that config.json names although no tensor is stored so; "": config.json is right.
    """

    layout: WeightLayout
    formats: PackedFormats = UNQUANTIZED
    method: str = "none"
    claimed: str = ""

    def found_in(self, names: Iterable[str]) -> QuantizationScheme:
        """Return the scheme that fits tensors of these names: plain floats if none of them is quantized."""
        end = "_blocks" if self.formats.experts is PackedFormat.MXFP4 else f".{self.layout.suffixes[-1]}"
        if self.method == "none" or any(name.endswith(end) for name in names):
            return self
        return QuantizationScheme(Dense(), claimed=self.method)


def read_scheme(config: dict[str, Any], source: str) -> QuantizationScheme:
    """Read the `quantization_config` of a parsed config.json.

    Raises:
        InvalidCheckpoint: a method or a feature that is not supported; names the source and the field.
    """
    fields = config.get("quantization_config")
    if fields is None:
        return QuantizationScheme(Dense())
    if not isinstance(fields, dict):
        raise InvalidCheckpoint(f"{source}: quantization_config must be an object")
    method = fields.get("quant_method")
    reader = {"compressed-tensors": _compressed, "gptq": _gptq, "awq": _awq, "mxfp4": _mxfp4}.get(str(method))
    if reader is None:
        raise _unsupported(source, f"quantization_config ({method})")
    return msgspec.structs.replace(reader(fields, source), method=str(method))


def _gptq(fields: dict[str, Any], source: str) -> QuantizationScheme:
    bits = _bits(fields.get("bits"), (4, 8), source)
    zero_shift = 0 if fields.get("checkpoint_format") == "gptq_v2" else 1
    return QuantizationScheme(Gptq(bits, zero_shift), _formats(bits, fields.get("sym") is True))


def _awq(fields: dict[str, Any], source: str) -> QuantizationScheme:
    if fields.get("version", "gemm") != "gemm":
        raise _unsupported(source, f"awq version {fields['version']!r}")
    bits = _bits(fields.get("bits"), (4,), source)
    return QuantizationScheme(Awq(), _formats(bits, fields.get("zero_point") is False))


def _mxfp4(fields: dict[str, Any], source: str) -> QuantizationScheme:
    """Return a scheme that quantizes experts alone, which have a reader of their own; the rest is stored as floats."""
    return QuantizationScheme(Dense(), PackedFormats(experts=PackedFormat.MXFP4))


def _compressed(fields: dict[str, Any], source: str) -> QuantizationScheme:
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
        return QuantizationScheme(CompressedPacked(bits), _formats(bits, is_symmetric))
    if fields.get("format") == "int-quantized" and bits == 8 and is_symmetric:
        return QuantizationScheme(CompressedInts(), _formats(bits, is_symmetric))
    raise _unsupported(source, f"compressed-tensors format {fields.get('format')!r}")


def _formats(bits: int, is_symmetric: bool) -> PackedFormats:
    """Return formats that hold integers of these bits; symmetric ones have their zero in the middle, in every group."""
    if bits == 8:
        return PackedFormats(PackedFormat.INT8)
    return PackedFormats(PackedFormat.INT4 if is_symmetric else PackedFormat.INT4_OFFSET)


def _unsupported(source: str, what: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"{source}: {what} is not supported; supported: {SUPPORTED}")


def _bits(bits: Any, choices: tuple[int, ...], source: str) -> int:
    if bits not in choices:
        raise InvalidCheckpoint(f"{source}: weights of {bits} bits are not supported; supported: {choices}")
    return int(bits)
