"""What adapters add to a product, by the same kernels that make it: y += scale * (x A^T) B^T for some of the rows.

Rows of one adapter are multiplied together, those of others one adapter after the other, and the rows of the base model
are not touched. A row's sums are made by kernels whose results do not depend on other rows, in the order of the parts,
so its bits are those that it has alone. The products are grouped by adapter as in Punica (Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill.model.kernels.native_adapter import NativeAdapter
from tokenmill.model.kernels.protocol import Gate, LinearWeight
from tokenmill.model.kernels.torch_kernels import gated

AdapterSource = tuple[str, str]
"""The digest of an adapter's files, and their folder."""


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """What is added to one projection: scale * b a.

    Attributes:
        start: of its columns among the outputs of the matrix.
        a: [rank, in_size]. b: [columns, rank]; floats of any dtype.
    """

    start: int
    a: torch.Tensor
    b: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """What an adapter adds to one projection of a fused matrix.

    Attributes:
        start: of its columns among the outputs of the matrix.
        rank_start: of its rows in the A of the matrix.
        b: B, [columns, rank].
    """

    start: int
    rank_start: int
    b: LinearWeight
    scale: float


@dataclass(frozen=True, slots=True)
class LinearAdapter:
    """What an adapter adds to one matrix.

    Attributes:
        a: the A of all its parts, their rows stacked: [sum of ranks, in_size].
    """

    a: LinearWeight
    parts: tuple[AdapterPart, ...]

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.a.num_bytes + sum(part.b.num_bytes for part in self.parts)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y [T, out_size] with what belongs to x [T, in_size], rounded once for each part; y is overwritten."""
        inner = self.a.multiply(x)
        for part in self.parts:
            columns, rank = part.b.shape
            own = y[:, part.start : part.start + columns]
            added = part.b.logits(inner[:, part.rank_start : part.rank_start + rank].contiguous())
            own.copy_(own.float().add_(added.float(), alpha=part.scale))
        return y


@dataclass(frozen=True, slots=True)
class EmbeddingAdapter:
    """What an adapter adds to embeddings.

    Attributes:
        a: A as columns, [vocab_size, rank]. b: B, [hidden_size, rank].
    """

    a: torch.Tensor
    b: LinearWeight
    scale: float

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        return self.a.nbytes + self.b.num_bytes

    def add(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] with what belongs to the tokens [n]; rounded once."""
        return (hidden.float() + self.b.logits(self.a[token_ids]).float() * self.scale).to(hidden.dtype)


LayerAdapters = Mapping[str, LinearAdapter]
"""Those of one layer, by the role of the first projection in each matrix."""


class AdaptedLayer(Protocol):
    """Which rows of a step have which adapters, in one layer."""

    def add(self, role: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y [T, out_size], which is x W^T, with what the adapters add to it. `role`: see `LayerAdapters`."""

    def gated(
        self, role: str, weight: LinearWeight, x: torch.Tensor, bias: torch.Tensor | None, gate: Gate
    ) -> torch.Tensor:
        """See `LinearWeight.gated`; rows with adapters have theirs added before the gate."""

    def keep(self, only: torch.Tensor) -> AdaptedLayer:
        """The same of some rows, [S] int64, increasing."""


@dataclass(frozen=True, slots=True)
class GroupedLayer:
    """See `AdaptedLayer`: rows grouped by adapter.

    Attributes:
        uses: [n] int64, increasing, and the adapter of these rows; in the order of the slots.
        base: [m] int64, the rows that have none.
    """

    uses: tuple[tuple[torch.Tensor, LayerAdapters], ...]
    base: torch.Tensor

    def add(self, role: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """See `AdaptedLayer.add`."""
        for rows, adapters in self.uses:
            if role in adapters:
                y[rows] = adapters[role].add(x[rows], y[rows])
        return y

    def gated(
        self, role: str, weight: LinearWeight, x: torch.Tensor, bias: torch.Tensor | None, gate: Gate
    ) -> torch.Tensor:
        """See `AdaptedLayer.gated`."""
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
        """See `AdaptedLayer.keep`."""
        return GroupedLayer(
            tuple((_places(rows, only), adapters) for rows, adapters in self.uses), _places(self.base, only)
        )


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter in the form in which the model runs.

    Attributes:
        layers: what it adds to the matrices of each layer, where they are multiplied one by one.
        native: the same where the pass is one native call; None: it is not.
        modules: the same where steps read it from a slot of a device's memory, by layer and role; None: they do not.
        embedding, head: what it adds to these; None: nothing.
    """

    layers: Sequence[LayerAdapters]
    native: NativeAdapter | None
    modules: Mapping[tuple[int, str], Sequence[AdapterModule]] | None = None
    embedding: EmbeddingAdapter | None = None
    head: LinearAdapter | None = None

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
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
    """Which rows of a step have which adapters.

    Attributes:
        adapters: those in the step, in the order of their slots.
        of_row: [T] int32, which of these each row has; -1: none.
        sources: digest and folder of each, from which other ranks read their parts.
    """

    adapters: tuple[Adapter, ...]
    of_row: torch.Tensor
    sources: tuple[AdapterSource, ...] = ()

    @property
    def change_embeddings(self) -> bool:
        """Whether one of them adds to embeddings."""
        return any(adapter.embedding is not None for adapter in self.adapters)

    def add_embeddings(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add to the embeddings [T, hidden_size] of tokens [T] in place."""
        for number, adapter in enumerate(self.adapters):
            rows = (self.of_row == number).nonzero().squeeze(1)
            if adapter.embedding is not None and len(rows):
                hidden[rows] = adapter.embedding.add(token_ids[rows], hidden[rows])

    def layers(self, num_layers: int) -> Sequence[AdaptedLayer]:
        """Of each layer, where its matrices are multiplied one by one."""
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
