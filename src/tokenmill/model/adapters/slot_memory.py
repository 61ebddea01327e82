"""Device memory for adapters: slots in every matrix of a model, which steps and graphs read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import torch

from tokenmill.model.adapters.places import EMBEDDING, HEAD, OUTSIDE, Place, places_of
from tokenmill.model.kernels.adapters import AdaptedLayer, Adapter, AdapterRows
from tokenmill.model.kernels.protocol import Gate, Kernels, LinearWeight
from tokenmill.model.kernels.triton.adapters import SlotEmbedding, SlotMatrix
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
        embedding: of the embedding. head: of the output head; None: the model has none.
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
        tokens, size = decoder.architecture.vocab_size, decoder.architecture.hidden_size
        self.embedding = SlotEmbedding(num_slots, max_rank, (tokens, size), like)
        has_head = decoder.head is not None
        self.head = SlotMatrix(num_slots, max_rank, size, [(0, tokens)], like) if has_head else None

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        outside = sum(one.num_bytes for one in (self.embedding, self.head) if one is not None)
        return outside + sum(matrix.num_bytes for layer in self.layers for matrix in layer.values())

    def fill(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot, behind the steps that are issued already."""
        assert adapter.modules is not None, "it was read for slots"
        for index, layer in enumerate(self.layers):
            for role, matrix in layer.items():
                matrix.fill(slot, adapter.modules.get((index, role), ()))
        self.embedding.fill(slot, adapter.modules.get(EMBEDDING, ()))
        if self.head is not None:
            self.head.fill(slot, adapter.modules.get(HEAD, ()))


class SlottedLayer(msgspec.Struct, frozen=True):
    """The adapters of one layer by the slot of each row, for rows in any order."""

    matrices: LayerSlots
    slots: torch.Tensor

    def add(self, role: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add to y the products of each row's adapter."""
        return self.matrices[role].add(x, y, self.slots)

    def gated(
        self, role: str, weight: LinearWeight, x: torch.Tensor, bias: torch.Tensor | None, gate: Gate
    ) -> torch.Tensor:
        """Multiply by the weight, add the adapters, and apply the gate."""
        return gated(self.add(role, x, weight.multiply(x, bias)), gate)

    def keep(self, only: torch.Tensor) -> SlottedLayer:
        """Return the same of some rows."""
        return SlottedLayer(self.matrices, self.slots[only])


class SlottedHead(msgspec.Struct, frozen=True):
    """The addition of the adapter in one slot to the output head."""

    matrix: SlotMatrix
    slot: int

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return logits y [T, vocab_size] with the adapter's part for x [T, hidden_size], in the dtype of x.

        So are those that tokens are sampled from, by the same kernel.
        """
        slots = torch.full((len(x),), self.slot, dtype=torch.int32, device=x.device)
        return self.matrix.add(x, y.to(x.dtype), slots)


class SlottedRows(AdapterRows, frozen=True, kw_only=True):
    """Adapters in memory of a device; `of_row` is the slot of each row."""

    memory: SlotMemory

    def add_embeddings(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the adapters' parts to the embeddings [T, hidden_size] of tokens [T] in place."""
        self.memory.embedding.add(token_ids, hidden, self.of_row)

    def layers(self, num_layers: int) -> Sequence[AdaptedLayer]:
        """Return the slotted adapters of each layer."""
        return [SlottedLayer(layer, self.of_row) for layer in self.memory.layers]
