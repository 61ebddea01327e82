"""Bind what a native pass reads besides ids: a step's adapters and media, and what layers are given of their own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tokenmill.model.kernels.native import MODULE
from tokenmill.model.kernels.native_weight import STORED_ELEMENTS, PackedWeight
from tokenmill.model.kernels.operands import in_one_piece, is_a, rounded
from tokenmill.model.models.native_projection import bind_projection
from tokenmill.platform.arrays import address

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.model.architecture.architecture import Architecture
    from tokenmill.model.attention.batch import MediaTokens
    from tokenmill.model.kernels.adapters import Adapter, AdapterRows
    from tokenmill.model.models.per_layer import PerLayerInputs


def step_adapters(rows: AdapterRows | None) -> tuple[int, list[_native.Adapter]]:
    """Return the address of each token's adapter number, and the adapters in native form."""
    if rows is None:
        return 0, []
    assert in_one_piece(rows.of_row) and is_a("int32", rows.of_row), "as the pass reads it"
    return address(rows.of_row), [_bound(adapter) for adapter in rows.adapters]


def _bound(adapter: Adapter) -> _native.Adapter:
    assert adapter.native is not None, "adapters of a native pass have their form for it"
    bound, outside = adapter.native.native, adapter.embedding
    if outside is not None:
        assert isinstance(outside.b, PackedWeight), "its matrices are packed"
        bound.embed(address(outside.a), outside.b.shape[1], outside.b.packed, outside.scale)
    return bound


def step_media(media: MediaTokens | None) -> _native.StepMedia:
    """Return the media embeddings that stand in the place of token embeddings."""
    native = importlib.import_module(MODULE)
    if media is None or media.embeddings is None:
        return native.StepMedia(0, 0, 0, 0)
    values, indices = media.embeddings, media.indices
    assert in_one_piece(values, indices) and is_a("bfloat16", values), "as the pass reads it"
    return native.StepMedia(address(indices), len(indices), address(values), values.shape[1] - 1)


def bind_inputs(native: _native.Decoder, inputs: PerLayerInputs, architecture: Architecture) -> None:
    """Bind the inputs that layers have of their own; their table has to be mapped."""
    assert inputs.table is not None and architecture.per_layer is not None, "the table is mapped with the weights"
    assert in_one_piece(inputs.table.values), "a row of the table is in one piece"
    size, table = architecture.per_layer.size, (address(inputs.table.values), STORED_ELEMENTS[inputs.table.dtype])
    # The scale is rounded to the model's dtype, as that of the embeddings is.
    scales = architecture.hidden_size**-0.5, rounded(size**0.5, "bfloat16")
    native.give_inputs(bind_projection(inputs.projection), address(inputs.norm.weight), size, *table, *scales)
