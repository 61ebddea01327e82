"""Allocate the memory that steps work on, once the weights are loaded, with the KV cache that sizing decided on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.engine.runner.row_tables import RowTables
from tokenmill.model.attention.groups import GroupedAttention
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.attention.registry import AttentionChoice
from tokenmill.model.kernels.states import StateMemory
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.sampling.state import SamplingState
from tokenmill.platform.prefault import prefault
from tokenmill.platform.protocol import Platform
from tokenmill.startup.sizing.kv_size import KVSize

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array, ArrayLibrary
    from tokenmill.startup.assembly.draft_loading import LoadedDraft

    ArraysAndPieces = tuple[tuple[Array, ...], tuple[Array, ...]]


class StepMemory(msgspec.Struct, frozen=True):
    """The memory that steps work on: the tables of rows, and the KV cache in the attention backend's layout.

    Attributes:
        draft: the attention of a draft model, over pages with the same ids and scratch pages behind them.
        beside: what a draft model keeps of each page besides KV, [1, pages, ...] each; moved and stored with the page.
        states: of layers with recurrences; None: the model has no such layers.
    """

    size: KVSize
    tables: RowTables
    sampling: SamplingState
    attention: AttentionBackend
    draft: AttentionBackend | None = None
    states: StateMemory | None = None
    beside: tuple[Array, ...] = ()

    @property
    def kv_tensors(self) -> tuple[Array, ...]:
        """All arrays of the KV cache, each [layers, pages, ...]."""
        return (*self.attention.kv.tensors, *(() if self.draft is None else self.draft.kv.tensors), *self.beside)

    @property
    def kv_pieces(self) -> tuple[Array, ...]:
        """The same memory in one piece each, see `KVCache`."""
        return (*self.attention.kv.pieces, *(() if self.draft is None else self.draft.kv.pieces), *self.beside)

    @property
    def full_kv(self) -> ArraysAndPieces:
        """The arrays of pages that all requests keep, those of a draft model included, and their pieces."""
        tensors, pieces = self._of_groups(are_windowed=False)
        behind = (self.draft.kv.tensors, self.draft.kv.pieces) if self.draft is not None else ((), ())
        return (*tensors, *behind[0], *self.beside), (*pieces, *behind[1], *self.beside)

    @property
    def window_kv(self) -> ArraysAndPieces:
        """The arrays of pages of the window group, and their pieces."""
        return self._of_groups(are_windowed=True)

    def _of_groups(self, are_windowed: bool) -> ArraysAndPieces:
        attention = self.attention
        if not isinstance(attention, GroupedAttention):
            return ((), ()) if are_windowed else (attention.kv.tensors, attention.kv.pieces)
        pairs = zip(attention.kv.groups, attention.are_windowed, strict=True)
        caches = [kv for kv, is_windowed in pairs if is_windowed == are_windowed]
        return tuple(one for kv in caches for one in kv.tensors), tuple(one for kv in caches for one in kv.pieces)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache."""
        return sum(tensor.nbytes for tensor in self.kv_tensors)


def allocate(
    config: EngineConfig,
    platform: Platform,
    decoder: Decoder,
    attention: AttentionChoice,
    size: KVSize,
    draft: LoadedDraft | None = None,
    arrays: ArrayLibrary | None = None,
) -> StepMemory:
    """Allocate the memory of steps with a KV cache of this size, the pages of a draft model included.

    Args:
        arrays: the library that the KV cache comes from, instead of the device's own.
    """
    # An accelerator has one row more, for padding.
    num_rows = config.max_num_seqs + platform.is_accelerator
    window = 0 if size.window is None else size.window.window
    # A prompt of the whole context is run where no output is needed; what it samples is written down all the same.
    tables = RowTables(num_rows, size.max_model_len + 1, config.page_size, platform.arrays, window)
    sampling = SamplingState(config.max_num_seqs, decoder.architecture.vocab_size)
    behind = None if draft is None else draft.attention.make(size.num_allocated + draft.num_scratch_pages)
    beside = () if draft is None else draft.beside(size.num_allocated, platform.arrays)
    # And its state.
    states = decoder.state_memory(size.num_states + 1, platform.arrays) if size.num_states else None
    made = attention.make(size.num_allocated, size.num_allocated_windows, arrays)
    return StepMemory(size, tables, sampling, made, behind, states, beside)


def take_memory(config: EngineConfig, platform: Platform, memory: StepMemory) -> Iterator[None]:
    """Touch KV memory before it is used, a little at each iteration, if the config asks for its size.

    A share of the machine's memory is taken as it is used, and so is more than the machine has; and what ranks share,
    each of which first writes what then lies in its own.
    """
    is_asked_for = config.kv_cache_memory_bytes is not None or config.num_pages is not None
    is_shared = config.context_parallel_size > 1
    if platform.is_accelerator or is_shared or not is_asked_for or memory.kv_bytes > platform.available_bytes():
        return iter(())
    return prefault(memory.kv_pieces)
