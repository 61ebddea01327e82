"""Bind projections to a native pass, by address; of those that are observed, also where their inputs are noted."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.observing import ObservedWeight
from tokenmill.platform.arrays import address

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.model.models.linear import Linear
    from tokenmill.platform.arrays import Array


def bind_projection(linear: Linear, column: int = 0) -> _native.Projection:
    """Bind a projection. `column`: where its outputs begin among those of all ranks, or in a shared buffer."""
    assert isinstance(linear.weight, PackedWeight), "its matrices are packed"
    projection: _native.Projection = importlib.import_module(MODULE).Projection(
        linear.weight.packed, address_of(linear.bias), column
    )
    if isinstance(linear.weight, ObservedWeight):
        projection.observe(*linear.weight.notes, *linear.weight.kept)
    return projection


def address_of(vector: Array | None) -> int:
    """Return where a vector begins; 0: it is absent."""
    return 0 if vector is None else address(vector)
