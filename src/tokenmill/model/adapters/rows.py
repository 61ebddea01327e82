"""The adapters of running requests' rows, and their form in a step on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from tokenmill.core.plan import StepPlan
from tokenmill.model.adapters.packing import PackedAdapter
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.model.kernels.adapters import AdapterRows

if TYPE_CHECKING:
    from tokenmill.model.kernels.adapter_parts import LinearAdapter

Find = Callable[[str], PackedAdapter]
"""An adapter by its digest. It is there as long as a request that has it is alive."""


class RowSlots:
    """The adapter slots of rows as the host knows them, on any device."""

    def __init__(self, num_rows: int, find: Find) -> None:
        self.of_row = np.full(num_rows, -1, dtype=np.int32)
        self._find = find

    def apply_plan(self, plan: StepPlan) -> dict[int, PackedAdapter]:
        """Take in the new rows of a plan; return the adapters that they have, by slot."""
        found = {}
        for new in plan.new_rows:
            self.of_row[new.row] = new.adapter_slot if new.adapter else -1
            if new.adapter:
                found[new.adapter_slot] = self._find(new.adapter)
        return found


class HostRowAdapters(RowExtension):
    """Row adapters on the host: steps read adapters where they are kept."""

    def __init__(self, num_rows: int, find: Find) -> None:
        self._slots = RowSlots(num_rows, find)
        self._adapters: dict[int, PackedAdapter] = {}

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in the new rows of a plan; nothing is to be sent."""
        self._adapters |= self._slots.apply_plan(plan)
        return {}

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Add which tokens of a step have which adapters, in the order of the slots, if any has one."""
        slots = self._slots.of_row[plan.rows[first:]]
        if (slots < 0).all():
            return batch
        used = np.unique(slots[slots >= 0])
        numbers = np.where(slots < 0, -1, np.searchsorted(used, slots)).astype(np.int32)
        packed = [self._adapters[slot] for slot in used.tolist()]
        rows = AdapterRows(
            tuple(one.adapter for one in packed),
            np.repeat(numbers, plan.num_scheduled[first:]),
            tuple((one.digest, one.path) for one in packed),
        )
        return msgspec.structs.replace(batch, adapters=rows)

    def head_of(self, row: int) -> LinearAdapter | None:
        """Return the part of a row's adapter that adds to the head; None: it has none."""
        slot = int(self._slots.of_row[row])
        return None if slot < 0 else self._adapters[slot].adapter.head
