"""Layouts of weights in checkpoints: as floats, or quantized in those of compressed-tensors, GPTQ and AWQ.

A layout names the tensors that together are one weight, says what shape they amount to, and reads them. They are those
that the three projects publish; bits are unpacked with whole-tensor shifts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.model.quantization.packed import QuantizedRows, Rows
from tokenmill.model.quantization.stored_array import StoredArray

FLOATS = ("F32", "F16", "BF16")
# AWQ packs eight outputs into a word in this order, lowest bits first.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

Parts = Mapping[str, StoredArray]
"""The tensors of a weight by suffix."""
Shapes = Mapping[str, tuple[int, ...]]
"""Their shapes."""


class Axis(msgspec.Struct, frozen=True):
    """The axis of a tensor that has the outputs or the inputs of its weight, and how many of them a number holds."""

    index: int = 0
    per_number: int = 1


class Inputs(NamedTuple):
    """Some of a weight's inputs, which a rank has, of `total`."""

    numbers: range
    total: int


class WeightLayout(Protocol):
    """A way of storing a weight."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of a module's name that name each tensor, e.g. `qweight`."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Suffixes that may be missing."""

    def outputs(self, suffix: str) -> Axis | None:
        """Return where the outputs lie in a tensor, so that a part can be read; None: it is of all outputs together.

        `read` takes such parts as well as whole tensors.
        """

    def inputs(self, suffix: str) -> Axis | None:
        """Return where the inputs lie in a tensor, so that a part can be read; None: it is of groups of them, or all.

        `read` has to be told which part it is.
        """

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Return (out_size, in_size), from the shapes of the tensors."""

    def read(self, parts: Parts, inputs: Inputs | None = None) -> Rows:
        """Return the weight, from its tensors by suffix; `inputs`: those that were read; None: all."""


class Dense:
    """Floats, row by row."""

    suffixes = ("weight",)
    optional = ()

    def outputs(self, suffix: str) -> Axis:
        """Return the first axis."""
        return Axis()

    def inputs(self, suffix: str) -> Axis:
        """Return the second axis."""
        return Axis(1)

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Return the tensor's own shape."""
        return shapes["weight"]

    def read(self, parts: Parts, inputs: Inputs | None = None) -> StoredArray:
        """Return the tensor as it is."""
        return parts["weight"]


class CompressedPacked(msgspec.Struct, frozen=True):
    """compressed-tensors `pack-quantized`: words of 32 bits along the inputs, values shifted to be unsigned."""

    bits: int
    suffixes: tuple[str, ...] = ("weight_packed", "weight_scale")
    optional: tuple[str, ...] = ("weight_zero_point", "weight_shape")

    def outputs(self, suffix: str) -> Axis | None:
        """Return the first axis, along which zero points are packed; the shape tensor has no outputs."""
        if suffix == "weight_shape":
            return None
        return Axis(per_number=32 // self.bits if suffix == "weight_zero_point" else 1)

    def inputs(self, suffix: str) -> Axis | None:
        """Return the second axis of the words."""
        return Axis(1, 32 // self.bits) if suffix == "weight_packed" else None

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Return (out_size, in_size), from the shape of the words."""
        rows, words = shapes["weight_packed"]
        return rows, words * 32 // self.bits

    def read(self, parts: Parts, inputs: Inputs | None = None) -> QuantizedRows:
        """Unpack the integers, and apply scales and zero points."""
        values, scales = unpack(parts["weight_packed"].values, self.bits), parts["weight_scale"].float32()
        zeros: Floats | np.float32 = np.float32(1 << (self.bits - 1))
        if "weight_zero_point" in parts:
            zeros = unpack(parts["weight_zero_point"].values.T, self.bits).T[: len(scales)].astype(np.float32)
            zeros = of_inputs(zeros, inputs)
        return affine(self.bits, values, of_inputs(scales, inputs), zeros)


class CompressedInts:
    """compressed-tensors `int-quantized`: plain int8 with a scale per output, or per group."""

    suffixes = ("weight", "weight_scale")
    optional = ()

    def outputs(self, suffix: str) -> Axis:
        """Return the first axis."""
        return Axis()

    def inputs(self, suffix: str) -> Axis | None:
        """Return the second axis of the int8 tensor."""
        return Axis(1) if suffix == "weight" else None

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape of the int8 tensor."""
        return shapes["weight"]

    def read(self, parts: Parts, inputs: Inputs | None = None) -> QuantizedRows:
        """Return the integers with their scales."""
        values, scales = parts["weight"].values, parts["weight_scale"].float32()
        return QuantizedRows(8, values, of_inputs(scales.reshape(len(values), -1), inputs))


class Gptq(msgspec.Struct, frozen=True):
    """GPTQ: words along the inputs, transposed; zeros are stored one too low, except in format 2.

    With `desc_act` the inputs of a group are scattered: such a weight is spelled out as floats.
    """

    bits: int
    zero_shift: int
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ("g_idx",)

    def outputs(self, suffix: str) -> Axis | None:
        """Return the second axis, along which zeros are packed; `g_idx` has no outputs."""
        if suffix == "g_idx":
            return None
        return Axis(1, 32 // self.bits if suffix == "qzeros" else 1)

    def inputs(self, suffix: str) -> Axis | None:
        """Return the first axis of the words; all of `g_idx` says whether groups are in order."""
        return Axis(0, 32 // self.bits) if suffix == "qweight" else None

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Return (out_size, in_size), from the shape of the transposed words."""
        words, rows = shapes["qweight"]
        return rows, words * 32 // self.bits

    def read(self, parts: Parts, inputs: Inputs | None = None) -> Rows:
        """Unpack the integers and apply zeros and scales; scattered groups give floats."""
        values = unpack(parts["qweight"].values.T, self.bits)
        scales = parts["scales"].float32().T
        zeros = unpack(parts["qzeros"].values, self.bits).T.astype(np.float32) + np.float32(self.zero_shift)
        if "g_idx" in parts and not is_in_order(groups := parts["g_idx"].values, scales.shape[1]):
            groups = groups if inputs is None else groups[inputs.numbers.start : inputs.numbers.stop]
            weight = values.astype(np.float32)
            weight -= zeros[:, groups]
            weight *= scales[:, groups]
            return StoredArray(weight, "F32")
        return affine(self.bits, values, of_inputs(scales, inputs), of_inputs(zeros, inputs))


class Awq:
    """AWQ, 4 bits: words along the outputs, in an order of their own."""

    suffixes = ("qweight", "qzeros", "scales")
    optional = ()

    def outputs(self, suffix: str) -> Axis:
        """Return the second axis, along which all but scales are packed."""
        return Axis(1, 1 if suffix == "scales" else 8)

    def inputs(self, suffix: str) -> Axis | None:
        """Return the first axis of the words."""
        return Axis() if suffix == "qweight" else None

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Return (out_size, in_size), from the shape of the transposed words."""
        in_size, words = shapes["qweight"]
        return words * 8, in_size

    def read(self, parts: Parts, inputs: Inputs | None = None) -> QuantizedRows:
        """Unpack integers and zeros, and apply the scales."""
        values, zeros = (self._unpack(parts[suffix].values) for suffix in ("qweight", "qzeros"))
        scales = of_inputs(parts["scales"].float32().T, inputs)
        return affine(4, values, scales, of_inputs(zeros.astype(np.float32), inputs))

    @staticmethod
    def _unpack(words: npt.NDArray[np.int32]) -> Bytes:
        """Unpack [n, words] -> [8 * words, n], outputs in their own order."""
        packed = np.ascontiguousarray(words.T, "<i4").view(np.uint8).reshape(-1, len(words), 4)
        own = np.empty((len(packed), 8, len(words)), np.uint8)
        for place, output in enumerate(AWQ_ORDER):
            byte, is_high = divmod(place, 2)
            own[:, output] = packed[:, :, byte] >> 4 if is_high else packed[:, :, byte] & 15
        return own.reshape(-1, len(words))


def unpack(words: npt.NDArray[np.int32], bits: int) -> Bytes:
    """Unpack [n, w] int32 -> [n, w * 32 / bits], lowest bits first; of 4 or 8 bits."""
    packed = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return packed
    fields = np.empty((len(packed), packed.shape[1], 2), np.uint8)
    np.bitwise_and(packed, 15, out=fields[:, :, 0])
    np.right_shift(packed, 4, out=fields[:, :, 1])
    return fields.reshape(len(packed), -1)


def affine(bits: int, values: Bytes, scales: Floats, zeros: Floats | np.float32) -> QuantizedRows:
    """Return (values - zeros) * scales, of unsigned values [n, in_size], scales and zeros [n, groups]."""
    scales = np.ascontiguousarray(scales)
    if bits == 4:
        return QuantizedRows(4, np.ascontiguousarray(values), scales, -np.ascontiguousarray(scales * zeros))
    # Bytes are held signed: 128 less.
    signed = np.ascontiguousarray(values ^ np.uint8(128)).view(np.int8)
    offsets = np.ascontiguousarray(scales * (np.float32(128) - zeros))
    return QuantizedRows(8, signed, scales, offsets if offsets.any() else None)


def of_inputs(numbers: Floats, inputs: Inputs | None) -> Floats:
    """Return numbers [n, groups] of all inputs for a part of these: [n, runs], of equal runs each within one group."""
    if inputs is None:
        return numbers
    wanted, group_size = inputs.numbers, inputs.total // numbers.shape[1]
    run = math.gcd(group_size, wanted.start, len(wanted))
    return numbers[:, np.arange(wanted.start, wanted.stop, run) // group_size]


def is_in_order(groups: npt.NDArray[Any], num_groups: int) -> bool:
    """Return True if input k lies in group k // (inputs / groups)."""
    return bool((groups == np.arange(len(groups)) // (len(groups) // num_groups)).all())
