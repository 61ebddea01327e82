"""`StateMemory`: the states of requests in layers that keep one, in slots, and the tokens of a step that use each.

Knows nothing of requests: the scheduler decides which request owns a slot. The first slots are those of the rows of
running requests, the others hold states kept for prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenmill.model.kernels.recurrence import StateRows
from tokenmill.platform.memory import zeros

Part = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one tensor of a layer's state."""


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


def step_states(
    memory: StateMemory,
    slots: np.ndarray,
    query_starts: np.ndarray,
    saves: tuple[np.ndarray, np.ndarray, np.ndarray] | None,
    device: torch.device | str,
) -> StepStates:
    """Make the states of a step from data on the host.

    Args:
        slots: [B] int64. query_starts: [B + 1] int32.
        saves: for N requests, each at most once: their places in the batch, the number of their tokens before the state
            to be kept (at least 1), and the slot that it is copied to; None to keep no state.
    """
    spans = np.stack((query_starts[:-1], query_starts[1:]), 1).astype(np.int32)
    if saves is None:
        return StepStates(memory, StateRows.of(slots, spans, device))
    places, counts, targets = saves
    first = spans.copy()
    first[places, 1] = spans[places, 0] + counts
    behind = first[:, 1] < spans[:, 1]
    rest = np.stack((first[:, 1], spans[:, 1]), 1)[behind]
    return StepStates(
        memory,
        StateRows.of(slots, first, device),
        StateRows.of(slots[behind], rest, device) if len(rest) else None,
        torch.from_numpy(slots[places]).to(device),
        torch.from_numpy(targets.astype(np.int64)).to(device),
    )
