"""`StateMemory`: the states of requests in layers that keep one, in slots, and the tokens of a step that use each.

Knows nothing of requests: the scheduler decides which request owns a slot. The first slots are those of the rows of
running requests, the others hold states kept for prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.model.kernels.recurrence import StateRows
from tokenmill.platform.tensor_memory import zeros

Part = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one tensor of a layer's state."""
# The names in `state_arrays`.
STATE_ARRAYS = ("states", "state_spans", "later_states", "later_spans", "save_sources", "save_targets")


class StateMemory:
    """The memory of one state per slot and layer.

    Attributes:
        layers: the tensors of each layer that keeps states, each [num_slots, ...], zeros at first.
    """

    def __init__(self, layers: Sequence[Sequence[Part]], num_slots: int, device: torch.device | str) -> None:
        self.num_slots = num_slots
        self.layers = [tuple(zeros((num_slots, *shape), dtype, device) for shape, dtype in parts) for parts in layers]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return sum(tensor.nbytes for tensors in self.layers for tensor in tensors)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy slots `sources` to slots `targets`, both [N] int64; a source below 0 is a state of zeros."""
        is_new = sources < 0
        for tensors in self.layers:
            for tensor in tensors:
                tensor[targets] = tensor[sources.clamp(min=0)].masked_fill_(_column(is_new, tensor), 0)


def _column(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True, slots=True)
class StepStates:
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
    sources: torch.Tensor | None = None
    targets: torch.Tensor | None = None

    def run(self, state: torch.Tensor, call: Callable[[StateRows], None]) -> None:
        """Run all tokens through one tensor of states, and copy the states to be kept."""
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


def step_states(
    memory: StateMemory, arrays: Mapping[str, npt.NDArray[Any]], sent: Mapping[str, torch.Tensor]
) -> StepStates:
    """Make the states of a step. `arrays`, `sent`: `state_arrays`, and maybe more, on the host and on the device."""

    def rows(slots: str, spans: str) -> StateRows:
        starts, stops = sent[spans]
        return StateRows(sent[slots], starts, stops, arrays[spans].T)

    later = rows("later_states", "later_spans") if "later_states" in arrays else None
    sources, targets = sent.get("save_sources"), sent.get("save_targets")
    return StepStates(memory, rows("states", "state_spans"), later, sources, targets)
