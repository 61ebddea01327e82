"""Turn a batch of the host's arrays into tensors over the same memory, for a decoder that computes in torch."""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

from tokenmill.model.attention.batch import BatchPages, DeviceLens, ForwardBatch, MediaTokens
from tokenmill.model.kernels.states import StateMemory, StateRows, StepStates
from tokenmill.platform.tensor_memory import tensor_of


class StateTensors:
    """Tensors over memories of states, made once for each."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[StateMemory, StateMemory] = WeakKeyDictionary()

    def of(self, memory: StateMemory) -> StateMemory:
        """Return the same memory as tensors."""
        if memory not in self._made:
            self._made[memory] = memory.viewed(tensor_of)
        return self._made[memory]


_STATES = StateTensors()  # until the cut: a HostDecoder holds its own


def with_tensors(batch: ForwardBatch, memories: StateTensors = _STATES) -> ForwardBatch:
    """Return a batch with tensors over the memory of its arrays; tensors are taken as they are."""
    lens, windows, adapters = batch.lens, batch.windows, batch.adapters
    return replace(
        batch,
        token_ids=tensor_of(batch.token_ids),
        positions=tensor_of(batch.positions),
        slots=tensor_of(batch.slots),
        page_table=tensor_of(batch.page_table),
        output_indices=tensor_of(batch.output_indices),
        lens=None if lens is None else DeviceLens(tensor_of(lens.context_lens), tensor_of(lens.query_starts)),
        windows=None if windows is None else BatchPages(tensor_of(windows.slots), tensor_of(windows.page_table)),
        adapters=None if adapters is None else replace(adapters, of_row=tensor_of(adapters.of_row)),
        media=None if batch.media is None else _media(batch.media),
        states=None if batch.states is None else _states(batch.states, memories),
    )


def _media(media: MediaTokens) -> MediaTokens:
    return replace(
        media,
        positions=tensor_of(media.positions),
        axes=tensor_of(media.axes),
        indices=tensor_of(media.indices),
        embeddings=None if media.embeddings is None else tensor_of(media.embeddings),
    )


def _states(states: StepStates, memories: StateTensors) -> StepStates:
    first, rest, sources, targets = states.first, states.rest, states.sources, states.targets
    return StepStates(
        memories.of(states.memory),
        _rows(first),
        None if rest is None else _rows(rest),
        None if sources is None else tensor_of(sources),
        None if targets is None else tensor_of(targets),
    )


def _rows(rows: StateRows) -> StateRows:
    return StateRows(tensor_of(rows.slots), tensor_of(rows.starts), tensor_of(rows.stops), rows.spans)
