"""`Taps`: copies of the hidden states that pass chosen boundaries between layers, for a draft head.

Boundary b lies behind b layers: 0 are the embeddings, and the last one is what the final norm takes. Knows no head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Taps:
    """The taps of one pass.

    Args:
        memory: [T, taps, hidden_size], of the pass's dtype.
    """

    __slots__ = ("_boundaries", "_memory", "_passed")

    def __init__(self, boundaries: Sequence[int], memory: torch.Tensor) -> None:
        self._boundaries = boundaries
        self._memory = memory
        self._passed = 0

    def take(self, hidden: torch.Tensor) -> None:
        """Copy the hidden states [T, hidden_size] of the next boundary, if it is one of those wanted."""
        for index, boundary in enumerate(self._boundaries):
            if boundary == self._passed:
                self._memory[:, index] = hidden
        self._passed += 1
