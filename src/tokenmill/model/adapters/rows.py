"""The adapters of running requests' rows, and their form in a step: on the host, or on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.core.plan import StepPlan
from tokenmill.model.adapters.packing import PackedAdapter
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.model.kernels.adapter_parts import LinearAdapter
from tokenmill.model.kernels.adapters import AdapterRows

if TYPE_CHECKING:
    from tokenmill.model.adapters.slot_memory import SlotMemory

Find = Callable[[str], PackedAdapter]
"""An adapter by its digest. It is there as long as a request that has it is alive."""


class _Slots:
    """The slots of rows on the host, which both forms use."""

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
        self._slots = _Slots(num_rows, find)
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
            torch.from_numpy(np.repeat(numbers, plan.num_scheduled[first:])),
            tuple((one.digest, one.path) for one in packed),
        )
        return replace(batch, adapters=rows)

    def head_of(self, row: int) -> LinearAdapter | None:
        """Return the part of a row's adapter that adds to the head; None: it has none."""
        slot = int(self._slots.of_row[row])
        return None if slot < 0 else self._adapters[slot].adapter.head


class DeviceRowAdapters(RowExtension):
    """Row adapters on a device: steps read them from slots in its memory, which are filled behind the steps before.

    Adapters with a part for the head are refused where they are read.

    Args:
        device: of the row tables, which have one row more than the engine, for padding, without an adapter.
    """

    def __init__(self, num_rows: int, find: Find, memory: SlotMemory, device: str) -> None:
        self._slots = _Slots(num_rows, find)
        self._memory = memory
        self._of_row = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=device)
        self._digests: dict[int, str] = {}  # of what stands in each slot
        self._new: dict[int, PackedAdapter] = {}

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in the new rows of a plan; return these rows and their slots for the device."""
        for slot, adapter in self._slots.apply_plan(plan).items():
            if self._digests.get(slot) != adapter.digest:
                self._digests[slot], self._new[slot] = adapter.digest, adapter
        if not plan.new_rows:
            return {}
        rows = np.array([new.row for new in plan.new_rows], np.int64)
        return {"adapter_rows": rows, "adapter_slots": self._slots.of_row[rows]}

    def apply(self, plan: StepPlan, sent: Sent) -> None:
        """Fill slots with new adapters, and update the slots of rows."""
        for slot, packed in self._new.items():
            self._memory.fill(slot, packed.adapter)
        self._new.clear()
        if "adapter_rows" in sent:
            self._of_row[sent["adapter_rows"]] = sent["adapter_slots"]

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Add the slots of a step's tokens, if any has an adapter."""
        return self.extend_decodes(batch, sent["row_of_token"]) if self.has_any(plan.rows[first:]) else batch

    def has_any(self, rows: npt.NDArray[np.integer]) -> bool:
        """Return True if one of these rows has an adapter."""
        return bool((self._slots.of_row[rows] >= 0).any())

    def extend_decodes(self, batch: ForwardBatch, rows: torch.Tensor) -> ForwardBatch:
        """Add the slots of the tokens' rows."""
        from tokenmill.model.adapters.slot_memory import SlottedRows

        return replace(batch, adapters=SlottedRows((), self._of_row[rows], (), self._memory.layers))
