"""Adapters in the form that the native pass reads: the Python side of native/adapter.h."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.model.kernels.adapter_parts import AdapterModule
from tokenmill.model.kernels.native import MODULE
from tokenmill.model.quantization.stored_array import StoredArray
from tokenmill.platform.arrays import address

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
        self._arrays: list[npt.NDArray[np.uint16]] = []

    def add(self, layer: int, role: str, modules: Sequence[AdapterModule]) -> None:
        """Add the modules of one matrix of a layer; `role` is that of the first projection in the matrix."""
        matrix, rank_start = MATRICES[role], 0
        a = self._keep(np.concatenate([_bits(module.a) for module in modules]))
        self.native.shrink(layer, matrix, address(a), *a.shape)
        for module in modules:
            columns, rank = module.b.shape
            padded = np.pad(_bits(module.b), ((0, -columns % self._block), (0, 0)))
            b = self._keep(padded.reshape(-1, self._block, rank).swapaxes(1, 2))
            place = (module.start, columns, rank_start, rank, module.scale)
            self.native.expand(layer, matrix, address(b), *place)
            rank_start += rank

    def _keep(self, values: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        array = np.ascontiguousarray(values)
        self._arrays.append(array)
        self.num_bytes += array.nbytes
        return array


def _bits(values: Any) -> npt.NDArray[np.uint16]:
    """Return floats as bfloat16."""
    assert isinstance(values, StoredArray), "adapters of a native pass are read into arrays"
    return values.bfloat16()
