"""The native kernels' integer arithmetic in plain torch: rounding of weights and activations, and their products."""

from __future__ import annotations

import torch

from tokenmill.model.quantization.packed import QuantizedRows

GROUP = 32
"""Inputs that share a scale in int4, and in the activations that int4 weights meet."""
BLOCK = 64
"""Inputs that share a scale in the activations that int8 weights meet."""
SMALLEST = 1e-30
"""Activations whose largest number is smaller count as zeros."""


def quantize_int8(weight: torch.Tensor) -> QuantizedRows:
    """Quantize [n, in_size] with one scale per row: -127 to 127 times a 127th of the row's largest magnitude."""
    weight = weight.float()
    most = weight.abs().amax(1, keepdim=True)
    values = (weight * _factor(127.0, most)).round().clamp(-127, 127)
    return QuantizedRows(8, values.nan_to_num(0, 0, 0).to(torch.int8), _finite(most, most / 127))


def quantize_int4(weight: torch.Tensor, has_offsets: bool = False) -> QuantizedRows:
    """Quantize [n, in_size] in groups of 32 inputs, the last one zero-padded; scales and offsets have half precision.

    Without offsets, a group's values are -8 to 7 times its scale, and its number of largest magnitude is -8 times it.
    With offsets, they are the group's smallest number plus 0 to 15 scales.
    """
    groups = _groups(weight.float())
    if has_offsets:
        offsets = groups.amin(-1, keepdim=True).half().float()
        scales = ((groups.amax(-1, keepdim=True) - offsets) / 15).half().float()
        values = ((groups - offsets) * _factor(1.0, scales)).round().clamp(0, 15)
    else:
        scales = (groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8).half().float()
        values = (groups * _factor(1.0, scales)).round().clamp(-8, 7) + 8
        offsets = -8 * scales
    return QuantizedRows(4, values.to(torch.uint8).flatten(1), scales[..., 0], offsets[..., 0])


def quantize_activations(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [T, in_size] to int8 [T, groups, group] and scales [T, groups, 1].

    A scale is NaN if a number of its group is not finite.
    """
    groups = _groups(x.float(), group)
    most = groups.abs().amax(-1, keepdim=True)
    used = most * (most >= SMALLEST)
    values = (groups * _factor(127.0, used)).round().nan_to_num(0, 0, 0)
    return values.to(torch.int8), _finite(most, used / 127)


def multiply(x: torch.Tensor, rows: QuantizedRows) -> torch.Tensor:
    """Return x W^T [T, n] float32, summed as the kernels do: integers exactly within a group, then groups in order."""
    group = BLOCK if rows.bits == 8 else GROUP
    values, x_scales = quantize_activations(x, group)
    scales = _expand(rows.scales, rows.group_size, group, values.shape[1])
    weights = _groups(rows.values, group).double()
    total = torch.zeros(x.shape[0], rows.shape[0], dtype=torch.float64)
    for g in range(values.shape[1]):
        sums = (values[:, g].double() @ weights[:, g].T).float()
        total += sums * (x_scales[:, g] * scales[:, g])
        if rows.offsets is not None:
            offsets = _expand(rows.offsets, rows.group_size, group, values.shape[1])
            total += values[:, g].float().sum(1, keepdim=True) * x_scales[:, g] * offsets[:, g]
    return total.float()


def _groups(x: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """Split [n, in_size] into [n, groups, group], zero-padded."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))


def _expand(per_group: torch.Tensor, group_size: int, group: int, groups: int) -> torch.Tensor:
    """Repeat the numbers of groups for those of fewer inputs that they consist of."""
    return per_group.repeat_interleave(-(-group_size // group), 1)[:, :groups]


def _factor(numerator: float, most: torch.Tensor) -> torch.Tensor:
    # A tensor above: torch makes a number / tensor a product with the reciprocal, which is rounded twice.
    return torch.where(most == 0, 0, torch.tensor(numerator) / most)


def _finite(most: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.where(most.isfinite(), scale, torch.nan)
