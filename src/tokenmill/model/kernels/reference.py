"""The native kernels' integer arithmetic in plain torch: rounding of weights and activations, and their products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.model.quantization.packed import QuantizedRows

GROUP = 32
"""Inputs that share a scale, in weights and in activations."""
SEARCH = tuple(step / 8 for step in range(-8, 9))
"""Inverse scales of int4 and int5 that are tried, counted from the one that just holds all numbers of a group."""
INT8_SEARCH = tuple(119 + step / 2 for step in range(17))
"""Inverse scales of int8 that are tried, times the group's largest magnitude."""
SMALLEST = 1e-30
"""Activations whose largest number is smaller count as zeros."""
ROTATED = 64
"""Inputs of a block that is rotated."""
UNIT = 256
"""Rotated activations that share a scale."""


def quantize_int8(weight: torch.Tensor, importance: torch.Tensor | None = None) -> QuantizedRows:
    """Quantize [n, in_size] in groups of 32 inputs, the last one zero-padded; scales have half precision.

    Values are -127 to 127 times a group's scale. Those are tried of which the largest magnitude is 119 to 127 times;
    the integers of each give the best scale by least squares.

    Args:
        importance: as of `quantize_int4`.
    """
    groups, weights = _groups(weight.float()), _weights(weight, importance)
    unit = _factor(1.0, groups.abs().amax(-1, keepdim=True))
    scales = _search_scale(groups, weights, unit, INT8_SEARCH, (-127, 127)).half().float()
    values = (groups * _factor(1.0, scales)).round().clamp(-127, 127).nan_to_num(0, 0, 0)
    return _rows(8, values.to(torch.int8), scales)


def quantize_int4(
    weight: torch.Tensor, has_offsets: bool = False, importance: torch.Tensor | None = None
) -> QuantizedRows:
    """Quantize [n, in_size] in groups of 32 inputs, the last one zero-padded; scales and offsets have half precision.

    Values are -8 to 7 times a group's scale or, with offsets, the offset plus 0 to 15 times it. Several scales around
    the one that just holds all numbers are tried; their integers give the best scale and offset by least squares.

    Args:
        importance: [in_size], how much the square of an input's error weighs; None: all the same.
    """
    return (_quantize_range if has_offsets else _quantize_centred)(weight, 4, importance)


def quantize_int5(
    weight: torch.Tensor, has_offsets: bool = False, importance: torch.Tensor | None = None
) -> QuantizedRows:
    """Quantize [n, in_size] as `quantize_int4` does, to -16 to 15 or 0 to 31 times a group's scale."""
    return (_quantize_range if has_offsets else _quantize_centred)(weight, 5, importance)


def _quantize_range(weight: torch.Tensor, bits: int, importance: torch.Tensor | None) -> QuantizedRows:
    groups, weights, most = _groups(weight.float()), _weights(weight, importance), (1 << bits) - 1
    scales, offsets = (found.half().float() for found in _search_range(groups, weights, most))
    values = ((groups - offsets) * _factor(1.0, scales)).round().clamp(0, most)
    return _rows(bits, values.to(torch.uint8), scales, offsets)


def _quantize_centred(weight: torch.Tensor, bits: int, importance: torch.Tensor | None) -> QuantizedRows:
    groups, half = _groups(weight.float()), 1 << (bits - 1)
    unit = _factor(1.0, groups.gather(-1, groups.abs().argmax(-1, keepdim=True)))
    tried, ends = [step - half for step in SEARCH], (-half, half - 1)
    scales = _search_scale(groups, _weights(weight, importance), unit, tried, ends).half().float()
    values = (groups * _factor(1.0, scales)).round().clamp(-half, half - 1) + half
    return _rows(bits, values.to(torch.uint8), scales, -half * scales)


def _rows(bits: int, values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None = None) -> QuantizedRows:
    """Return values [n, groups, 32] with scales and offsets [n, groups, 1] as quantized rows."""
    own = None if offsets is None else offsets[..., 0].numpy()
    return QuantizedRows(bits, values.flatten(1).numpy(), scales[..., 0].numpy(), own)


def _weights(weight: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    return _groups((torch.ones(weight.shape[1]) if importance is None else importance)[None])


def _search_scale(
    groups: torch.Tensor, weights: torch.Tensor, unit: torch.Tensor, tried: Sequence[float], ends: tuple[int, int]
) -> torch.Tensor:
    """Return the scale of each group [n, groups, 32], as [n, groups, 1].

    Args:
        weights: [1, groups, 32].
        unit, tried: inverse scales are these times a group's unit [n, groups, 1].
        ends: the smallest and the largest integer.
    """
    best, scale = torch.full_like(unit, -1), torch.zeros_like(unit)
    for factor in tried:
        q = (groups * (factor * unit)).round().clamp(*ends)
        weighted = weights * q
        x_times_q, q_squared = _sum(weighted * groups), _sum(weighted * q)
        found = torch.where(q_squared == 0, 0, x_times_q / q_squared)
        saved = found * x_times_q
        scale = torch.where(saved > best, found, scale)
        best = torch.where(saved > best, saved, best)
    return _finite(groups.abs().amax(-1, keepdim=True), scale)


def _search_range(groups: torch.Tensor, weights: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and offset of each group [n, groups, 32], both as [n, groups, 1]; weights: [1, groups, 32]."""
    low, high, total = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True), _sum(weights)
    distances, unit, mean = groups - low, _factor(1.0, high - low), _sum(weights * groups) / total
    centred = groups - mean
    best, scale, start = torch.zeros_like(unit), torch.zeros_like(unit), low
    for step in SEARCH:
        q = (distances * ((most + step) * unit)).clamp(0, most).round()
        middle = _sum(weights * q) / total
        around = q - middle
        weighted = weights * around
        variance, covariance = _sum(weighted * around), _sum(weighted * centred)
        slope = torch.where(variance == 0, 0, covariance / variance)
        saved = slope * covariance
        is_better = (total > 0) & (saved > best)
        scale, start = torch.where(is_better, slope, scale), torch.where(is_better, mean - slope * middle, start)
        best = torch.where(is_better, saved, best)
    return _finite(groups.abs().amax(-1, keepdim=True), scale), start


def _sum(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sums over the last dimension, of a power of two, in the order in which vector registers add."""
    while numbers.shape[-1] > 1:
        first, second = numbers.chunk(2, -1)
        numbers = first + second
    return numbers


def quantize_activations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [T, in_size] to int8 [T, groups, 32] and scales [T, groups, 1].

    A scale is NaN if a number of its group is not finite.
    """
    groups = _groups(x.float())
    most = groups.abs().amax(-1, keepdim=True)
    used = most * (most >= SMALLEST)
    values = (groups * _factor(127.0, used)).round().nan_to_num(0, 0, 0)
    return values.to(torch.int8), _finite(most, used / 127)


def multiply(x: torch.Tensor, rows: QuantizedRows) -> torch.Tensor:
    """Return x W^T [T, n] float32, summed as the kernels do: integers exactly within a group, then groups in order."""
    values, x_scales = quantize_activations(x)
    scales = _expand(torch.from_numpy(rows.scales), rows.group_size, values.shape[1])
    weights = _groups(torch.from_numpy(rows.values)).double()
    total = torch.zeros(x.shape[0], rows.shape[0], dtype=torch.float64)
    for g in range(values.shape[1]):
        sums = (values[:, g].double() @ weights[:, g].T).float()
        total += sums * (x_scales[:, g] * scales[:, g])
        if rows.offsets is not None:
            offsets = _expand(torch.from_numpy(rows.offsets), rows.group_size, values.shape[1])
            total += values[:, g].float().sum(1, keepdim=True) * x_scales[:, g] * offsets[:, g]
    return total.float()


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate [n, in_size] as native/isa/rotation.h does, zero-padded to whole blocks; its own inverse."""
    x = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % ROTATED))
    for apart in (16, 32, 1, 2, 4, 8):
        first, second = x.unflatten(1, (-1, 2, apart)).unbind(2)
        x = torch.stack((first + second, first - second), 2).flatten(1)
    return x * 0.125


def quantize_rotated(weight: torch.Tensor) -> QuantizedRows:
    """Quantize [n, in_size] to int8 of rotated inputs, zero-padded to whole blocks, with a scale for each row."""
    rotated = rotate(weight)
    most = rotated.abs().amax(-1, keepdim=True)
    scales = _finite(most, most / 127)
    values = (rotated * _factor(1.0, scales)).round().clamp(-127, 127).nan_to_num(0, 0, 0)
    return QuantizedRows(8, values.to(torch.int8).numpy(), scales.numpy())


def multiply_rotated(x: torch.Tensor, rows: QuantizedRows) -> torch.Tensor:
    """Return x W^T [T, n] float32 of rows that `quantize_rotated` made."""
    values, total = torch.from_numpy(rows.values).double(), torch.zeros(x.shape[0], rows.shape[0], dtype=torch.float64)
    for unit, weights in zip(rotate(x).split(UNIT, 1), values.split(UNIT, 1), strict=True):
        most = unit.abs().amax(-1, keepdim=True)
        used = most * (most >= SMALLEST)
        integers = (unit * _factor(127.0, used)).round().nan_to_num(0, 0, 0)
        total += (integers.double() @ weights.T) * _finite(most, used / 127)
    return (total * torch.from_numpy(rows.scales).T).float()


def _groups(x: torch.Tensor) -> torch.Tensor:
    """Split [n, in_size] into [n, groups, 32], zero-padded."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def _expand(per_group: torch.Tensor, group_size: int, groups: int) -> torch.Tensor:
    """Repeat the numbers of groups for those of 32 inputs that they consist of."""
    return per_group.repeat_interleave(-(-group_size // GROUP), 1)[:, :groups]


def _factor(numerator: float, most: torch.Tensor) -> torch.Tensor:
    # A tensor above: torch makes a number / tensor a product with the reciprocal, which is rounded twice.
    return torch.where(most == 0, 0, torch.tensor(numerator) / most)


def _finite(most: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.where(most.isfinite(), scale, torch.nan)
