"""The adapters of a step's rows where matrices are multiplied one by one, in torch.

Rows of one adapter are multiplied together, one adapter after the other; rows of the base model are not touched. A
row's sums are made by kernels whose results do not depend on other rows, in the order of the parts, so a row has the
same bits as it has alone. The products are grouped by adapter as in Punica (Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from tokenmill.model.kernels.adapter_parts import LayerAdapters
from tokenmill.model.kernels.protocol import Gate, LinearWeight
from tokenmill.model.kernels.torch_kernels import gated

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array


class GroupedLayer(msgspec.Struct, frozen=True):
    """The adapters of a step's rows in one layer, with the rows grouped by adapter.

    Attributes:
        uses: [n] int64, increasing, and the adapter of these rows; in the order of the slots.
        base: [m] int64, the rows without an adapter.
    """

    uses: tuple[tuple[torch.Tensor, LayerAdapters], ...]
    base: torch.Tensor

    def add(self, role: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the adapters' parts to y in place, one adapter after the other."""
        for rows, adapters in self.uses:
            if role in adapters:
                y[rows] = adapters[role].add(x[rows], y[rows])
        return y

    def gated(self, role: str, weight: LinearWeight, x: torch.Tensor, bias: Array | None, gate: Gate) -> torch.Tensor:
        """Compute the gated product of the base rows, then of each adapter's rows."""
        out = x.new_empty(x.shape[0], weight.shape[0] // 2)
        if len(self.base):
            out[self.base] = weight.gated(x[self.base], bias, gate)
        for rows, adapters in self.uses:
            own = x[rows]
            if role in adapters:
                out[rows] = gated(adapters[role].add(own, weight.multiply(own, bias)), gate)
            else:
                out[rows] = weight.gated(own, bias, gate)
        return out

    def keep(self, only: torch.Tensor) -> GroupedLayer:
        """Return the same groups for the rows `only`, renumbered by their place in it."""
        return GroupedLayer(
            tuple((_places(rows, only), adapters) for rows, adapters in self.uses), _places(self.base, only)
        )


def grouped_layers(
    adapters: Sequence[Sequence[LayerAdapters]], of_row: torch.Tensor, num_layers: int
) -> list[GroupedLayer]:
    """Return the adapted layers of a model, of the layers of each adapter; `of_row`: see `AdapterRows`."""
    rows = [(of_row == number).nonzero().squeeze(1) for number in range(-1, len(adapters))]
    return [
        GroupedLayer(tuple((own, one[index]) for own, one in zip(rows[1:], adapters, strict=True)), rows[0])
        for index in range(num_layers)
    ]


def _places(rows: torch.Tensor, only: torch.Tensor) -> torch.Tensor:
    return torch.isin(only, rows, assume_unique=True).nonzero().squeeze(1)
