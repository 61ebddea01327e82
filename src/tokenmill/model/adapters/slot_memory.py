"""Memory of a device for adapters: so many slots in every matrix of a model, which steps and graphs read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tokenmill.model.adapters.places import OUTSIDE, Place, places_of
from tokenmill.model.kernels.adapters import AdaptedLayer, Adapter, AdapterRows
from tokenmill.model.kernels.protocol import Gate, Kernels, LinearWeight
from tokenmill.model.kernels.triton.adapters import SlotMatrix
from tokenmill.model.kernels.triton.gate import gated
from tokenmill.model.models.decoder import Decoder

LayerSlots = Mapping[str, SlotMatrix]
"""Those of one layer, by the role of the first projection in each matrix."""


class SlotMemory:
    """The slots of all matrices.

    Args:
        max_rank: of an adapter; every slot has room for that.

    Attributes:
        layers: the matrices of each layer.
    """

    def __init__(self, decoder: Decoder, kernels: Kernels, num_slots: int, max_rank: int) -> None:
        matrices: dict[tuple[int, str], list[Place]] = defaultdict(list)
        for place in places_of(decoder):
            if place.matrix[0] != OUTSIDE:
                matrices[place.matrix].append(place)
        like = kernels.vector(0)
        self.layers: list[dict[str, SlotMatrix]] = [{} for _ in decoder.layers]
        for (layer, role), places in matrices.items():
            parts = [(place.start, place.outputs.count) for place in places]
            self.layers[layer][role] = SlotMatrix(num_slots, max_rank, places[0].in_size, parts, like)

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return sum(matrix.num_bytes for layer in self.layers for matrix in layer.values())

    def fill(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot, behind the steps that are issued already."""
        assert adapter.modules is not None, "it was read for slots"
        for index, layer in enumerate(self.layers):
            for role, matrix in layer.items():
                matrix.fill(slot, adapter.modules.get((index, role), ()))


@dataclass(frozen=True, slots=True)
class SlottedLayer:
    """See `AdaptedLayer`: of rows in any order, by the slot of each."""

    matrices: LayerSlots
    slots: torch.Tensor

    def add(self, role: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `AdaptedLayer.add`."""
        return self.matrices[role].add(x, y, self.slots)

    def gated(
        self, role: str, weight: LinearWeight, x: torch.Tensor, bias: torch.Tensor | None, gate: Gate
    ) -> torch.Tensor:
        """See `AdaptedLayer.gated`."""
        return gated(self.add(role, x, weight.multiply(x, bias)), gate)

    def keep(self, only: torch.Tensor) -> SlottedLayer:
        """See `AdaptedLayer.keep`."""
        return SlottedLayer(self.matrices, self.slots[only])


@dataclass(frozen=True, slots=True)
class SlottedRows(AdapterRows):
    """See `AdapterRows`: adapters are in memory of the device, and `of_row` says in which slot each row's is."""

    memory: Sequence[LayerSlots] = ()

    def layers(self, num_layers: int) -> Sequence[AdaptedLayer]:
        """See `AdapterRows.layers`."""
        return [SlottedLayer(layer, self.of_row) for layer in self.memory]
