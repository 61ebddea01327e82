"""Adapters in the form that the native pass reads: the Python side of native/adapter.h."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch.nn import functional

from tokenmill.model.kernels.adapter_parts import AdapterModule
from tokenmill.model.kernels.native import MODULE

MATRICES = MappingProxyType({"q": 0, "output": 1, "gate": 2, "up": 2, "down": 3})
"""A layer's matrices, by the roles of their first projections, in the order of native/adapter.h."""


class NativeAdapter:
    """The matrices of an adapter in bfloat16, as the native pass reads them: A row by row, B in blocks of columns.

    Attributes:
        native: the object handed to the native pass.
        num_bytes: memory of the matrices.
    """

    def __init__(self, num_layers: int) -> None:
        module = importlib.import_module(MODULE)
        self.native = module.Adapter(num_layers)
        self.num_bytes = 0
        self._block: int = module.ADAPTER_BLOCK
        self._tensors: list[torch.Tensor] = []

    def add(self, layer: int, role: str, modules: Sequence[AdapterModule]) -> None:
        """Add the modules of one matrix of a layer; `role` is that of the first projection in the matrix."""
        matrix, rank_start = MATRICES[role], 0
        a = self._keep(torch.cat([module.a for module in modules]))
        self.native.shrink(layer, matrix, a.data_ptr(), *a.shape)
        for module in modules:
            columns, rank = module.b.shape
            padded = functional.pad(module.b.to(torch.bfloat16), (0, 0, 0, -columns % self._block))
            b = self._keep(padded.view(-1, self._block, rank).transpose(1, 2))
            place = (module.start, columns, rank_start, rank, module.scale)
            self.native.expand(layer, matrix, b.data_ptr(), *place)
            rank_start += rank

    def _keep(self, values: torch.Tensor) -> torch.Tensor:
        tensor = values.to(torch.bfloat16).contiguous()
        self._tensors.append(tensor)
        self.num_bytes += tensor.nbytes
        return tensor
