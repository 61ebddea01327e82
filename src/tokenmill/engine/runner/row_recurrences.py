"""`RowRecurrences`: map rows to their recurrent states, and carry out a plan's loads and saves of states.

All that the device has to know of a step goes over with the step's other arrays. Requests that run in a graph find
their states by a table on the device; the others have them among the arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tokenmill.core.plan import StepPlan
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.model.kernels.states import StateMemory, StateRows, StepStates, state_arrays, step_states
from tokenmill.platform.arrays import ArrayLibrary

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array


class RowRecurrences(RowExtension):
    """The state slot of each row.

    Args:
        num_rows: rows of the tables. At first all have the last slot, which the row that pads graphs keeps.

    Attributes:
        memory: the states themselves.
        slots: [num_rows] int64 on the device.
    """

    def __init__(self, memory: StateMemory, num_rows: int, arrays: ArrayLibrary) -> None:
        self.memory = memory
        self._slots = np.full(num_rows, memory.num_slots - 1, dtype=np.int64)
        self.slots = arrays.full((num_rows,), memory.num_slots - 1, "int64")

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in the new rows of a plan; return the arrays that `apply` needs on the device."""
        arrays: Arrays = {}
        if plan.new_rows:
            arrays["state_rows"] = np.array([new.row for new in plan.new_rows], dtype=np.int64)
            arrays["row_states"] = np.array([new.state_slot for new in plan.new_rows], dtype=np.int64)
            self._slots[arrays["state_rows"]] = arrays["row_states"]
        if plan.states is not None and len(plan.states.load_slots):
            arrays["load_sources"] = plan.states.load_sources.astype(np.int64)
            arrays["load_targets"] = plan.states.load_slots.astype(np.int64)
        return arrays

    def apply(self, plan: StepPlan, sent: Sent) -> None:
        """Start new rows, on the device, with no tokens or with the kept state of a prefix."""
        if "state_rows" in sent:
            self.slots[sent["state_rows"]] = sent["row_states"]
        if "load_sources" in sent:
            self.memory.copy(sent["load_sources"], sent["load_targets"])

    def split(self, plan: StepPlan, query_starts: np.ndarray, first: int) -> Arrays:
        """Return the arrays of the requests from the `first` on, which run in no graph, and those of the saves."""
        arrays: Arrays = {}
        slots, orders, saves = self._slots[plan.rows], plan.states, None
        if orders is not None and len(orders.save_rows):
            order = np.argsort(plan.rows)
            places = order[np.searchsorted(plan.rows, orders.save_rows, sorter=order)]
            counts, targets = orders.save_ends - plan.num_computed[places], orders.save_slots.astype(np.int64)
            # Requests in a graph have one token: their states are kept when it has run.
            if (in_graph := places < first).any():
                arrays |= {"kept_sources": slots[places[in_graph]], "kept_targets": targets[in_graph]}
            if (later := ~in_graph).any():
                saves = places[later] - first, counts[later], targets[later]
        if first < len(slots):
            num_drafts = None if plan.draft_ids is None else (plan.num_samples[first:] - 1).clip(min=0)
            arrays |= state_arrays(slots[first:], query_starts[first:] - query_starts[first], saves, num_drafts)
        return arrays

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Add the states that tokens outside of graphs run through."""
        return msgspec.structs.replace(batch, states=step_states(self.memory, arrays, sent))

    def extend_decodes(self, batch: ForwardBatch, rows: Array) -> ForwardBatch:
        """Add the states of rows with a token each, found by the table on the device."""
        assert batch.lens is not None, "lengths are on the device"
        starts, spans = batch.lens.query_starts, np.arange(len(rows), dtype=np.int32)
        in_spans = np.stack((spans, spans + 1), 1)
        return msgspec.structs.replace(
            batch, states=StepStates(self.memory, StateRows(self.slots[rows], starts[:-1], starts[1:], in_spans))
        )

    def decoded(self, sent: Sent) -> None:
        """Keep the states that requests in a graph have come to."""
        if "kept_sources" in sent:
            self.memory.copy(sent["kept_sources"], sent["kept_targets"])
