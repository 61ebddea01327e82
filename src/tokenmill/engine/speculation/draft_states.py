"""`DraftStates`: let recurrent states take in the draft tokens that were right, once a step has told which.

A state cannot go back, so draft tokens change none: they run behind the known tokens of their request, and what they
make of its state is dropped. But what each layer's state takes of them is kept, some kilobytes a token, and those that
were right run through the states again by it. That reads no weights; the numbers are those of a plain decode, since
the kernels are the same and take one token after the other.

    tokens    |known ... last| draft  draft  draft |
    state     |  advances    |       stays         |    the step
                             |right |                   its end: advances again

Knows plans and results; not who drafts, and not which request owns a state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import StepPlan, StepResult
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.model.kernels.states import KeptInputs, StateMemory, StateRows
from tokenmill.platform.arrays import ArrayLibrary

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray

Replay = Callable[[StateMemory, KeptInputs, StateRows], None]
"""Advances states by tokens whose inputs were kept; see `Decoder.replay`."""


class DraftStates(RowExtension):
    """Keeps the inputs of drafts from a step's pass until its outcome is there. Stands behind `RowRecurrences`."""

    def __init__(self, memory: StateMemory, arrays: ArrayLibrary, replay: Replay) -> None:
        self._memory = memory
        self._arrays = arrays
        self._replay = replay
        # By step: the slots of the requests that have drafts, and what is kept of these.
        self._steps: dict[int, tuple[AnyArray, KeptInputs]] = {}

    def fits_graph(self, num_samples: npt.NDArray[np.integer]) -> bool:
        """Return False for drafts: in a graph each token is a row, which would advance its state."""
        return bool((num_samples == 1).all())

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Remember where the pass will keep the inputs of its drafts."""
        states = batch.states
        if states is not None and states.drafts is not None and states.inputs is not None:
            self._steps[plan.step] = states.drafts.slots, states.inputs
        return batch

    def ended(self, plan: StepPlan, result: StepResult) -> None:
        """Run the drafts that were right through the states of their requests."""
        kept = self._steps.pop(plan.step, None)
        if kept is None:
            return
        slots, inputs = kept
        drafted = np.flatnonzero(plan.num_samples > 1)
        num_drafts = plan.num_samples[drafted] - 1
        num_right = np.minimum(result.token_starts[drafted + 1] - result.token_starts[drafted] - 1, num_drafts)
        right = np.flatnonzero(num_right > 0)
        if len(right):
            starts = (np.cumsum(num_drafts) - num_drafts)[right]
            spans = np.stack((starts, starts + num_right[right])).astype(np.int32)
            places, on_device = self._arrays.from_host(right), self._arrays.from_host(spans)
            self._replay(self._memory, inputs, StateRows(slots[places], on_device[0], on_device[1], spans.T))

    def close(self) -> None:
        """Forget steps whose outcome never came."""
        self._steps.clear()
