"""Per-layer embeddings (Gemma 3n and 4): each layer is given a small vector of its own for every token.

It is half a row of a table, which is as large as the rest of a small model and on a CPU is not loaded: it stays mapped
from the checkpoint's file, of which a step reads the rows of its tokens. A GPU, which reads no files, has it in memory.
The other half is a projection of the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenmill.model.architecture.architecture import Architecture, PerLayerSpec
from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.kernels.operands import rounded
from tokenmill.model.kernels.protocol import Activation, Kernels, WeightRole
from tokenmill.model.models.linear import Linear
from tokenmill.model.models.norm import RMSNorm
from tokenmill.model.models.targets import Target, TargetScope
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.model.sharding.shard import Part

if TYPE_CHECKING:
    import torch


class PerLayerInputs:
    """The inputs that all layers get of their own, made once a step.

    Attributes:
        table: [vocab_size, layers * size] as it is stored, mapped from the file; None: not filled yet, or `loaded`.
        loaded: the same in memory, of kernels that map no tables.
    """

    __slots__ = ("_kernels", "_num_layers", "_projection_scale", "_size", "loaded", "norm", "projection", "table")

    def __init__(self, architecture: Architecture, spec: PerLayerSpec, kernels: Kernels) -> None:
        self._num_layers, self._size, self._kernels = len(architecture.layers), spec.size, kernels
        width = self._num_layers * spec.size
        self._projection_scale = architecture.hidden_size**-0.5
        self.projection = Linear(architecture.hidden_size, {"per_layer_projection": Part.whole(width)}, False, kernels)
        self.norm = RMSNorm(spec.size, architecture.norm, kernels)
        self.table: StoredArray | None = None
        self.loaded = None
        if not kernels.maps_tables:
            self.loaded = kernels.linear_weight(spec.vocab_size, width, WeightRole.EMBEDDING)

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return each layer's input, [layers, T, size], for tokens [T] int64 and embeddings [T, hidden_size]."""
        projected = self._kernels.scaled_sum(self.projection.forward(hidden), self._projection_scale)
        normed = self.norm.forward(projected.view(-1, self._size))
        # The scale is rounded to the model's dtype, as that of the embeddings is.
        rows = self._rows(token_ids).to(hidden.dtype)
        scale = rounded(self._size**0.5, self._kernels.dtype)
        both = self._kernels.scaled_sum(normed.view_as(rows), 2**-0.5, rows, scale)
        return both.view(-1, self._num_layers, self._size).transpose(0, 1)

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.loaded is not None:
            return self.loaded.lookup(token_ids)
        # Imported here: native kernels run where there is no torch.
        from tokenmill.model.kernels.stored_tensors import tensor_of

        assert self.table is not None, "the table is mapped when the weights are read"
        return tensor_of(self.table[token_ids.numpy()])

    def targets(self, scope: TargetScope, spec: PerLayerSpec) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this part."""
        yield from self.projection.targets(scope)
        yield scope.vector("per_layer_norm", self.norm.weight)
        if self.loaded is not None:
            yield scope.matrix("per_layer_table", self.loaded)
            return
        yield scope.mapped("per_layer_table", (spec.vocab_size, self._num_layers * self._size), self._map)

    def _map(self, table: StoredArray) -> None:
        self.table = table


class PerLayerBlock:
    """The third block of a layer: a gate over the layer's input for the token, projected and normed.

    Args:
        number: of the layer.
    """

    __slots__ = ("_kernels", "_number", "gate", "norm", "output")

    def __init__(self, number: int, size: int, hidden_size: int, norm: NormSpec, kernels: Kernels) -> None:
        self._number, self._kernels = number, kernels
        self.gate = Linear(hidden_size, {"per_layer_gate": Part.whole(size)}, False, kernels)
        self.output = Linear(size, {"per_layer_output": Part.whole(hidden_size)}, False, kernels)
        self.norm = RMSNorm(hidden_size, norm, kernels)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Return the block's addition to x [T, hidden_size]; `given` [layers, T, size]."""
        gated = self._kernels.multiply(
            self._kernels.activate(self.gate.forward(x), Activation.GELU), given[self._number]
        )
        return self.norm.forward(self.output.forward(gated))

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this block."""
        yield from self.gate.targets(scope)
        yield from self.output.targets(scope)
        yield scope.vector("per_layer_out_norm", self.norm.weight)
