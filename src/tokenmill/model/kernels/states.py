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
        keeps: the slots become the states that the tokens come to; else they stay as they are: the tokens are drafts.
    """

    slots: AnyArray
    starts: AnyArray
    stops: AnyArray
    spans: npt.NDArray[np.int32]
    keeps: bool = True


class StateMemory:
    """The memory of one state per slot and layer.

    Args:
        inputs: of each layer, the widths of what its state takes of a token, and their dtype.

    Attributes:
        layers: the arrays of each layer that keeps states, each [num_slots, ...], zeros at first.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[Part]],
        num_slots: int,
        arrays: ArrayLibrary,
        inputs: tuple[Sequence[Sequence[int]], str] = ((), ""),
    ) -> None:
        self.num_slots = num_slots
        self._inputs = inputs
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

    def draft_inputs(self, count: int) -> list[tuple[AnyArray, ...]]:
        """Return memory for what each layer's state takes of `count` draft tokens, [count, width] each."""
        layers, dtype = self._inputs
        return [tuple(self._arrays.empty((count, width), dtype) for width in widths) for widths in layers]

    def copy(self, sources: Array, targets: Array) -> None:
        """Copy slots `sources` to slots `targets`, both [N] int64; a source below 0 is a state of zeros."""
        is_new, there = sources < 0, self._arrays.at_least(sources, 0)
        for states in self.layers:
            for state in states:
                column = is_new.reshape(-1, *[1] * (len(state.shape) - 1))
                state[targets] = self._arrays.where(column, 0, state[there])


class KeptInputs(msgspec.Struct, frozen=True):
    """Inputs of layers' states of a step's draft tokens, by which those that were right run through the states again.

    Attributes:
        tokens: [D] int64, the draft tokens by their places in the step.
        layers: of each layer that keeps states, [D, ...] each, written by the pass.
    """

    tokens: AnyArray
    layers: list[tuple[AnyArray, ...]]


class StepStates(msgspec.Struct, frozen=True):
    """The states of a step's requests, and the copies of them that the step keeps.

    |<- first ->| sources are copied to targets |<- rest ->|<- drafts, which change no slot ->|

    Attributes:
        first: each request's tokens up to the state to be kept, or up to the end of the step or its drafts.
        rest: the tokens after that; None if there are no more.
        sources, targets: [N] int64, slots; None if no state is kept.
        drafts, inputs: the tokens that may be rejected, and what is kept of them; None: there are none.
    """

    memory: StateMemory
    first: StateRows
    rest: StateRows | None = None
    sources: AnyArray | None = None
    targets: AnyArray | None = None
    drafts: StateRows | None = None
    inputs: KeptInputs | None = None

    def run(self, state: Array, call: Callable[[StateRows], None]) -> None:
        """Run all tokens through one array of states, and copy the states to be kept."""
        call(self.first)
        if self.sources is not None and self.targets is not None:
            state[self.targets] = state[self.sources]
        if self.rest is not None:
            call(self.rest)
        if self.drafts is not None:
            call(self.drafts)

    def keep_drafts(self, place: int, *inputs: Array) -> None:
        """Keep what the states of layer `place` take of the draft tokens. `inputs`: [T, width] each."""
        if self.inputs is not None:
            for kept, own in zip(self.inputs.layers[place], inputs, strict=True):
                kept[:] = own[self.inputs.tokens]


def state_arrays(
    slots: npt.NDArray[np.int64],
    query_starts: npt.NDArray[np.int32],
    saves: tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]] | None,
    num_drafts: npt.NDArray[np.int32] | None = None,
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays from which `step_states` makes the states of a step.

    Args:
        slots: [B] int64. query_starts: [B + 1] int32.
        saves: for N requests, each at most once: their places in the batch, the number of their tokens before the state
            to be kept (at least 1), and the slot that it is copied to; None to keep no state.
        num_drafts: [B] int32, how many tokens at the end of each request are drafts, fewer than all; None: none are.
    """
    spans = np.stack((query_starts[:-1], query_starts[1:])).astype(np.int32)
    arrays: dict[str, npt.NDArray[Any]] = {"states": slots, "state_spans": spans}
    if num_drafts is not None and (drafted := num_drafts > 0).any():
        stops = spans[1, drafted]
        drafts = np.stack((stops - num_drafts[drafted], stops)).astype(np.int32)
        tokens = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in drafts.T])
        spans[1] -= num_drafts
        arrays |= {"draft_states": slots[drafted], "draft_spans": drafts, "draft_tokens": tokens}
    if saves is None:
        return arrays
    places, counts, targets = saves
    first = spans.copy()
    first[1, places] = spans[0, places] + counts
    arrays["state_spans"] = first
    behind = first[1] < spans[1]
    if behind.any():
        arrays |= {"later_states": slots[behind], "later_spans": np.stack((first[1][behind], spans[1][behind]))}
    return arrays | {"save_sources": slots[places], "save_targets": targets.astype(np.int64)}


def step_states(memory: StateMemory, arrays: Mapping[str, npt.NDArray[Any]], sent: Mapping[str, Array]) -> StepStates:
    """Make the states of a step. `arrays`, `sent`: `state_arrays`, and maybe more, on the host and on the device."""

    def rows(slots: str, spans: str, keeps: bool = True) -> StateRows:
        starts, stops = sent[spans]
        return StateRows(sent[slots], starts, stops, arrays[spans].T, keeps)

    later = rows("later_states", "later_spans") if "later_states" in arrays else None
    sources, targets = sent.get("save_sources"), sent.get("save_targets")
    states = StepStates(memory, rows("states", "state_spans"), later, sources, targets)
    if "draft_states" not in arrays:
        return states
    inputs = KeptInputs(sent["draft_tokens"], memory.draft_inputs(len(arrays["draft_tokens"])))
    return msgspec.structs.replace(states, drafts=rows("draft_states", "draft_spans", keeps=False), inputs=inputs)
