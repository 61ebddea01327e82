"""Which adapters the rows of running requests have, and what a step is told of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tokenmill.adapters.packing import PackedAdapter
from tokenmill.core.plan import StepPlan
from tokenmill.kernels.adapters import AdapterRows


class RowAdapters:
    """Rows, slots, and the adapters that stand in these; a plan brings the differences.

    Args:
        find: an adapter by its digest. It is there as long as a request that has it is alive.
    """

    def __init__(self, num_rows: int, find: Callable[[str], PackedAdapter]) -> None:
        self._slot_of_row = np.full(num_rows, -1, dtype=np.int32)
        self._slots: dict[int, PackedAdapter] = {}
        self._find = find

    def set(self, plan: StepPlan) -> None:
        """Take in the new rows of a plan."""
        for new in plan.new_rows:
            self._slot_of_row[new.row] = new.adapter_slot if new.adapter else -1
            if new.adapter:
                self._slots[new.adapter_slot] = self._find(new.adapter)

    def rows_of(self, plan: StepPlan) -> AdapterRows | None:
        """Which tokens of a step have which adapters, in the order of the slots; None: none has any."""
        slots = self._slot_of_row[plan.rows]
        if (slots < 0).all():
            return None
        used = np.unique(slots[slots >= 0])
        numbers = np.where(slots < 0, -1, np.searchsorted(used, slots)).astype(np.int32)
        packed = [self._slots[slot] for slot in used.tolist()]
        return AdapterRows(
            tuple(one.adapter for one in packed),
            torch.from_numpy(np.repeat(numbers, plan.num_scheduled)),
            tuple((one.digest, one.path) for one in packed),
        )
