"""`StepTaps`: ask each step of the model for the hidden states that a draft head takes. Knows no head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tokenmill.core.plan import StepPlan
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray, ArrayLibrary


class StepTaps(RowExtension):
    """Gives each batch memory for its taps, and keeps that of the last step.

    Args:
        shape: taps of a token, and the size of each.
        dtype: of the model's activations.
    """

    def __init__(self, shape: tuple[int, int], dtype: str, arrays: ArrayLibrary) -> None:
        self._shape = shape
        self._dtype = dtype
        self._arrays = arrays
        self._last: tuple[StepPlan, AnyArray, AnyArray] | None = None

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Return the batch with memory for taps."""
        taps = self._arrays.empty((len(batch.token_ids), *self._shape), self._dtype)
        self._last = plan, batch.slots, taps
        return msgspec.structs.replace(batch, taps=taps)

    def take(self, plan: StepPlan) -> tuple[AnyArray, AnyArray]:
        """Return the KV slots [T] of the tokens of a step that has run, and their taps [T, taps, size]."""
        assert self._last is not None and self._last[0] is plan, "the head follows each step before the next one begins"
        _, slots, taps = self._last
        self._last = None
        return slots, taps
