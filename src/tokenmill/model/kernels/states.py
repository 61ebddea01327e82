"""`StateMemory`: the states of requests in layers that keep one, in slots, and the tokens of a step that use each.

Knows nothing of requests: the scheduler decides which request owns a slot. The first slots are those of the rows of
running requests, the others hold states kept for prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.platform.arrays import ArrayLibrary

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray, Array

Part = tuple[tuple[int, ...], str]
"""Shape and dtype of one array of a layer's state."""


class StateRows(msgspec.Struct, frozen=True):
    """The tokens of a step that run through each state.

    |<- not here ->|<- starts[0] .. stops[0]: slots[0] ->|<- not here ->|<- starts[1] .. stops[1]: slots[1] ->| ...

    Attributes:
        slots: [B] int64, all different.
        starts, stops: [B] int32, increasing; each span has at least one token.
        spans: [B, 2] int32, the same two on the host.
    """

    slots: AnyArray
    starts: AnyArray
    stops: AnyArray
    spans: npt.NDArray[np.int32]


class StateMemory:
    """The memory of one state per slot and layer.

    Attributes:
        layers: the arrays of each layer that keeps states, each [num_slots, ...], zeros at first.
    """

    def __init__(self, layers: Sequence[Sequence[Part]], num_slots: int, arrays: ArrayLibrary) -> None:
        self.num_slots = num_slots
        self.layers: list[tuple[AnyArray, ...]] = [
            tuple(arrays.zeros((num_slots, *shape), dtype) for shape, dtype in parts) for parts in layers
        ]
        self._arrays = arrays

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(state.nbytes for states in self.layers for state in states)

    @property
    def pieces(self) -> tuple[Array, ...]:
        """The arrays of all layers as [1, num_slots, ...]: what lies in a slot, as pages lie in KV memory."""
        return tuple(state[None] for states in self.layers for state in states)

    def copy(self, sources: Array, targets: Array) -> None:
        """Copy slots `sources` to slots `targets`, both [N] int64; a source below 0 is a state of zeros."""
        is_new, there = sources < 0, self._arrays.at_least(sources, 0)
        for states in self.layers:
            for state in states:
                column = is_new.reshape(-1, *[1] * (len(state.shape) - 1))
                state[targets] = self._arrays.where(column, 0, state[there])


class StepStates(msgspec.Struct, frozen=True):
    """The states of a step's requests, and the copies of them that the step keeps.

    |<- first ->| sources are copied to targets |<- rest ->|

    Attributes:
        first: each request's tokens up to the state to be kept, or up to the end of the step.
        rest: the tokens after that; None if there are no more.
        sources, targets: [N] int64, slots; None if no state is kept.
    """

    memory: StateMemory
    first: StateRows
    rest: StateRows | None = None
    sources: AnyArray | None = None
    targets: AnyArray | None = None

    def run(self, state: Array, call: Callable[[StateRows], None]) -> None:
        """Run all tokens through one array of states, and copy the states to be kept."""
        call(self.first)
        if self.sources is not None and self.targets is not None:
            state[self.targets] = state[self.sources]
        if self.rest is not None:
            call(self.rest)


def state_arrays(
    slots: npt.NDArray[np.int64],
    query_starts: npt.NDArray[np.int32],
    saves: tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]] | None,
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays from which `step_states` makes the states of a step.

    Args:
        slots: [B] int64. query_starts: [B + 1] int32.
        saves: for N requests, each at most once: their places in the batch, the number of their tokens before the state
            to be kept (at least 1), and the slot that it is copied to; None to keep no state.
    """
    spans = np.stack((query_starts[:-1], query_starts[1:])).astype(np.int32)
    if saves is None:
        return {"states": slots, "state_spans": spans}
    places, counts, targets = saves
    first = spans.copy()
    first[1, places] = spans[0, places] + counts
    arrays: dict[str, npt.NDArray[Any]] = {"states": slots, "state_spans": first}
    behind = first[1] < spans[1]
    if behind.any():
        arrays |= {"later_states": slots[behind], "later_spans": np.stack((first[1][behind], spans[1][behind]))}
    return arrays | {"save_sources": slots[places], "save_targets": targets.astype(np.int64)}


def step_states(memory: StateMemory, arrays: Mapping[str, npt.NDArray[Any]], sent: Mapping[str, Array]) -> StepStates:
    """Make the states of a step. `arrays`, `sent`: `state_arrays`, and maybe more, on the host and on the device."""

    def rows(slots: str, spans: str) -> StateRows:
        starts, stops = sent[spans]
        return StateRows(sent[slots], starts, stops, arrays[spans].T)

    later = rows("later_states", "later_spans") if "later_states" in arrays else None
    sources, targets = sent.get("save_sources"), sent.get("save_targets")
    return StepStates(memory, rows("states", "state_spans"), later, sources, targets)
