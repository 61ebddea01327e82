"""Add adapters to a product, by the same kernels that make it: y += scale * (x A^T) B^T for some of the rows.

One native call adds them itself; where matrices are multiplied one by one, `grouped_adapters` does. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from tokenmill.model.kernels.adapter_parts import AdapterModule, EmbeddingAdapter, LayerAdapters, LinearAdapter
from tokenmill.model.kernels.native_adapter import NativeAdapter
from tokenmill.model.kernels.protocol import Gate, LinearWeight
from tokenmill.model.quantization.stored_array import StoredArray

if TYPE_CHECKING:
    import torch

    from tokenmill.platform.arrays import Array

AdapterSource = tuple[str, str]
"""The digest of an adapter's files, and their folder."""


class AdaptedLayer(Protocol):
    """The adapters of a step's rows in one layer."""

    def add(self, role: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Add the adapters' parts to y = x W^T [T, out_size] and return it; `role` is a key of `LayerAdapters`."""

    def gated(self, role: str, weight: LinearWeight, x: torch.Tensor, bias: Array | None, gate: Gate) -> torch.Tensor:
        """Return the gated product as `LinearWeight.gated` does, with the adapters added before the gate."""

    def keep(self, only: torch.Tensor) -> AdaptedLayer:
        """Return the same layer for some rows only: [S] int64, increasing."""


class Adapter(msgspec.Struct, frozen=True):
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
            return sum(_num_bytes(one.a) + _num_bytes(one.b) for own in self.modules.values() for one in own)
        return sum(linear.num_bytes for layer in self.layers for linear in layer.values())


class AdapterRows(msgspec.Struct, frozen=True):
    """The adapters of a step and the rows that use them.

    Attributes:
        adapters: the adapters of the step, in the order of their slots.
        of_row: [T] int32, index of each row's adapter; -1 for none.
        sources: digest and folder of each, from which other ranks read their parts.
    """

    adapters: tuple[Adapter, ...]
    of_row: Array
    sources: tuple[AdapterSource, ...] = ()

    def add_embeddings(self, token_ids: Any, hidden: Any) -> None:
        """Add the adapters' parts to the embeddings [T, hidden_size] of tokens [T] in place."""
        for number, adapter in enumerate(self.adapters):
            rows = self.of_row == number
            rows = np.flatnonzero(rows) if isinstance(rows, np.ndarray) else rows.nonzero().squeeze(1)
            if adapter.embedding is not None and len(rows):
                hidden[rows] = adapter.embedding.add(token_ids[rows], hidden[rows])

    def layers(self, num_layers: int) -> Sequence[AdaptedLayer]:
        """Return the adapted layers of a model whose matrices are multiplied one by one."""
        # Imported here: native kernels run where there is no torch.
        from tokenmill.model.kernels.grouped_adapters import grouped_layers
        from tokenmill.model.kernels.stored_tensors import tensor_over

        return grouped_layers([one.layers for one in self.adapters], tensor_over(self.of_row), num_layers)


def _num_bytes(values: StoredArray | torch.Tensor) -> int:
    return values.values.nbytes if isinstance(values, StoredArray) else values.nbytes
