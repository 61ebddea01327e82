"""A norm as plain frozen data."""

from __future__ import annotations

import msgspec


class NormSpec(msgspec.Struct, frozen=True):
    """An RMSNorm, or a LayerNorm.

    Attributes:
        is_offset: its weight is an offset from 1 (Gemma).
        is_centered: it is a LayerNorm: the mean of the numbers is taken from them first. has_bias: and a bias is added.
    """

    eps: float
    is_offset: bool = False
    is_centered: bool = False
    has_bias: bool = False

    def num_parameters(self, size: int) -> int:
        """Return the number of parameters over `size` numbers."""
        return size * (1 + self.has_bias)
