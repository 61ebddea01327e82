"""`RowRecurrences`: map rows to their recurrent states, and carry out a plan's loads and saves of states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tokenmill.core.plan import StepPlan
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.model.kernels.states import StateMemory, StepStates, step_states


class RowRecurrences(RowExtension):
    """The state slot of each row.

    Attributes:
        memory: the states themselves.
    """

    def __init__(self, memory: StateMemory, num_rows: int, device: torch.device) -> None:
        self.memory = memory
        self._slots = np.zeros(num_rows, dtype=np.int64)
        self._device = device

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in the new rows of a plan."""
        for new in plan.new_rows:
            self._slots[new.row] = new.state_slot
        return {}

    def apply(self, plan: StepPlan, sent: Sent) -> None:
        """Start new rows, on the device, with no tokens or with the kept state of a prefix."""
        if plan.states is not None and len(plan.states.load_slots):
            sources, slots = (
                torch.from_numpy(numbers.astype(np.int64)).to(self._device)
                for numbers in (plan.states.load_sources, plan.states.load_slots)
            )
            self.memory.copy(sources, slots)

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Add the states that a step's tokens run through."""
        assert first == 0, "a recurrence runs in no graph"
        return replace(batch, states=self._states_of(plan, batch.query_starts))

    def _states_of(self, plan: StepPlan, query_starts: np.ndarray) -> StepStates:
        slots, orders = self._slots[plan.rows], plan.states
        if orders is None or not len(orders.save_rows):
            return step_states(self.memory, slots, query_starts, None, self._device)
        order = np.argsort(plan.rows)
        places = order[np.searchsorted(plan.rows, orders.save_rows, sorter=order)]
        saves = (places, orders.save_ends - plan.num_computed[places], orders.save_slots)
        return step_states(self.memory, slots, query_starts, saves, self._device)
