"""Matrix products over fused weights, and how their parts are called in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch.nn import functional

Empty = Callable[..., torch.Tensor]
"""Makes an uninitialized tensor of a shape; dtype and device are bound in it."""

Target = tuple[str, torch.Tensor]
"""A tensor's name in a checkpoint, and the (view of a) parameter that takes its values."""


# Below these row counts the CPU libraries of torch take other code paths, whose sums round differently; padded up to
# them, a token's result hardly ever depends on who shares its batch (measured: MKL, one thread: never; oneDNN: rarely).
FEWEST_ROWS = {torch.float32: 8, torch.bfloat16: 4}


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b: [T, in_size] -> [T, out_size]; on a CPU, the same code whether T is 1 or more."""
    missing = FEWEST_ROWS.get(x.dtype, 0) - x.shape[0] if x.is_cpu else 0
    if missing <= 0:
        return functional.linear(x, weight, bias)
    return functional.linear(functional.pad(x, (0, 0, 0, missing)), weight, bias)[: x.shape[0]]


class Linear:
    """`y = x W^T + b` for one or several projections of the same input, their rows stacked in one weight.

    Attributes:
        weight: [sum of part sizes, in_size].
        bias: [sum of part sizes], or None.
    """

    __slots__ = ("bias", "parts", "weight")

    def __init__(self, in_size: int, parts: Mapping[str, int], bias: bool, empty: Empty) -> None:
        """Allocate the weight.

        Args:
            parts: name of each projection in a checkpoint -> its output size, in the order of the stacked rows.
        """
        self.parts = parts
        self.weight = empty(sum(parts.values()), in_size)
        self.bias = empty(sum(parts.values())) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_size] -> [T, sum of part sizes]."""
        return product(x, self.weight, self.bias)

    def targets(self, prefix: str) -> Iterator[Target]:
        """The checkpoint tensors that fill this layer."""
        start = 0
        for part, size in self.parts.items():
            yield f"{prefix}.{part}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}.{part}.bias", self.bias[start : start + size]
            start += size
