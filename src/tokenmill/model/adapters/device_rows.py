"""The adapters of running requests' rows, and their form in a step on a device."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tokenmill.core.plan import StepPlan
from tokenmill.model.adapters.packing import PackedAdapter
from tokenmill.model.adapters.places import HEAD
from tokenmill.model.adapters.rows import Find, RowSlots
from tokenmill.model.adapters.slot_memory import SlotMemory, SlottedHead, SlottedRows
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent


class DeviceRowAdapters(RowExtension):
    """Row adapters on a device: steps read them from slots in its memory, which are filled behind the steps before.

    Args:
        device: of the row tables, which have one row more than the engine, for padding, without an adapter.
    """

    def __init__(self, num_rows: int, find: Find, memory: SlotMemory, device: str) -> None:
        self._slots = RowSlots(num_rows, find)
        self._memory = memory
        self._of_row = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=device)
        self._digests: dict[int, str] = {}  # of what stands in each slot
        self._new: dict[int, PackedAdapter] = {}
        self._heads: dict[int, bool] = {}  # by slot, whether what stands there adds to the head

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in the new rows of a plan; return these rows and their slots for the device."""
        for slot, adapter in self._slots.apply_plan(plan).items():
            if self._digests.get(slot) != adapter.digest:
                self._digests[slot], self._new[slot] = adapter.digest, adapter
            self._heads[slot] = HEAD in (adapter.adapter.modules or ())
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
        return msgspec.structs.replace(batch, adapters=SlottedRows((), self._of_row[rows], memory=self._memory))

    def head_of(self, row: int) -> SlottedHead | None:
        """Return the part of a row's adapter that adds to the head; None: it has none."""
        slot, head = int(self._slots.of_row[row]), self._memory.head
        return SlottedHead(head, slot) if head is not None and self._heads.get(slot) else None

    def add_logits(
        self, outputs: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, known: npt.NDArray[np.integer] | None
    ) -> None:
        """Add the parts of the rows' adapters that add to the head."""
        head = self._memory.head
        if head is not None and (known is None or any(map(self.head_of, np.unique(known).tolist()))):
            head.add(outputs, logits, head.holding(self._of_row[rows]))
