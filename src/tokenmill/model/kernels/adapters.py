"""Add adapters to a product, by the same kernels that make it: y += scale * (x A^T) B^T for some of the rows.

Rows of one adapter are multiplied together, one adapter after the other; rows of the base model are not touched. A
row's sums are made by kernels whose results do not depend on other rows, in the order of the parts, so a row has the
same bits as it has alone. The products are grouped by adapter as in Punica (Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill.model.kernels.adapter_parts import AdapterModule, EmbeddingAdapter, LayerAdapters, LinearAdapter
from tokenmill.model.kernels.native_adapter import NativeAdapter
from tokenmill.model.kernels.protocol import Gate, LinearWeight
from tokenmill.model.kernels.torch_kernels import gated

AdapterSource = tuple[str, str]
"""The digest of an adapter's files, and their folder."""


class AdaptedLayer(Protocol):
    """The adapters of a step's rows in one layer."""

    def add(self, role: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the adapters' parts to y = x W^T [T, out_size] and return it; `role` is a key of `LayerAdapters`."""

    def gated(
        self, role: str, weight: LinearWeight, x: torch.Tensor, bias: torch.Tensor | None, gate: Gate
    ) -> torch.Tensor:
        """Return the gated product as `LinearWeight.gated` does, with the adapters added before the gate."""

    def keep(self, only: torch.Tensor) -> AdaptedLayer:
        """Return the same layer for some rows only: [S] int64, increasing."""


@dataclass(frozen=True, slots=True)
class GroupedLayer:
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

    def gated(
        self, role: str, weight: LinearWeight, x: torch.Tensor, bias: torch.Tensor | None, gate: Gate
    ) -> torch.Tensor:
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


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in the form in which the model runs it.

    Attributes:
        layers: its additions to the matrices of each layer, where these are multiplied one by one.
        native: the same for a pass that is one native call; None for any other pass.
        modules: the same by layer and role, for steps that read it from a slot of a device's memory; None for others.
        embedding, head: its additions to these; None if it has none.
    """

    layers: Sequence[LayerAdapters]
    native: NativeAdapter | None
    modules: Mapping[tuple[int, str], Sequence[AdapterModule]] | None = None
    embedding: EmbeddingAdapter | None = None
    head: LinearAdapter | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the weights in bytes."""
        outside = sum(one.num_bytes for one in (self.embedding, self.head) if one is not None)
        return outside + self._bytes_of_layers

    @property
    def _bytes_of_layers(self) -> int:
        if self.native is not None:
            return self.native.num_bytes
        if self.modules is not None:
            return sum(one.a.nbytes + one.b.nbytes for modules in self.modules.values() for one in modules)
        return sum(linear.num_bytes for layer in self.layers for linear in layer.values())


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The adapters of a step and the rows that use them.

    Attributes:
        adapters: the adapters of the step, in the order of their slots.
        of_row: [T] int32, index of each row's adapter; -1 for none.
        sources: digest and folder of each, from which other ranks read their parts.
    """

    adapters: tuple[Adapter, ...]
    of_row: torch.Tensor
    sources: tuple[AdapterSource, ...] = ()

    @property
    def change_embeddings(self) -> bool:
        """True if one of the adapters adds to embeddings."""
        return any(adapter.embedding is not None for adapter in self.adapters)

    def add_embeddings(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add the adapters' parts to the embeddings [T, hidden_size] of tokens [T] in place."""
        for number, adapter in enumerate(self.adapters):
            rows = (self.of_row == number).nonzero().squeeze(1)
            if adapter.embedding is not None and len(rows):
                hidden[rows] = adapter.embedding.add(token_ids[rows], hidden[rows])

    def layers(self, num_layers: int) -> Sequence[AdaptedLayer]:
        """Return the adapted layers of a model whose matrices are multiplied one by one."""
        rows = [(self.of_row == number).nonzero().squeeze(1) for number in range(-1, len(self.adapters))]
        return [
            GroupedLayer(
                tuple((own, adapter.layers[index]) for own, adapter in zip(rows[1:], self.adapters, strict=True)),
                rows[0],
            )
            for index in range(num_layers)
        ]


def _places(rows: torch.Tensor, only: torch.Tensor) -> torch.Tensor:
    return torch.isin(only, rows, assume_unique=True).nonzero().squeeze(1)
