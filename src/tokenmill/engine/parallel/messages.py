"""Messages that rank 0 posts to the other ranks: msgpack structs, arrays as their bytes.

On CPUs a message is one pass, or one use of the head. A pass is a step's batch: the plan as rank 0 has applied it to
its tables. So the others keep no tables that could come to differ, and need not be told which tokens were sampled: they
find them in the next batch. On devices, which are ahead of their hosts, a message is the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tokenmill.core.plan import StepPlan
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.kernels.adapters import Adapter, AdapterRows, AdapterSource


class RunPass(msgspec.Struct, tag=0, array_like=True):
    """Run the layers over the tokens of a batch; see `ForwardBatch`.

    Attributes:
        width: pages in a row of the page table.
        adapters, of_row: see `AdapterRows`.
    """

    token_ids: memoryview
    positions: memoryview
    slots: memoryview
    page_table: memoryview
    width: int
    query_lens: memoryview
    context_lens: memoryview
    query_starts: memoryview
    output_indices: memoryview
    adapters: list[AdapterSource] = []
    of_row: memoryview = memoryview(b"")

    @classmethod
    def from_batch(cls, batch: ForwardBatch) -> RunPass:
        """Make the message for a batch on the CPU."""
        return cls(
            _bytes(batch.token_ids.numpy()),
            _bytes(batch.positions.numpy()),
            _bytes(batch.slots.numpy()),
            _bytes(batch.page_table.numpy()),
            batch.page_table.shape[1],
            _bytes(batch.query_lens),
            _bytes(batch.context_lens),
            _bytes(batch.query_starts),
            _bytes(batch.output_indices.numpy()),
            [] if batch.adapters is None else list(batch.adapters.sources),
            memoryview(b"") if batch.adapters is None else _bytes(np.asarray(batch.adapters.of_row)),
        )

    def batch(self, find: Callable[[Sequence[AdapterSource]], tuple[Adapter, ...]]) -> ForwardBatch:
        """Return the batch, in memory of its own. `find`: returns this rank's parts of adapters."""
        adapters = AdapterRows(find(self.adapters), _tensor(self.of_row, np.int32)) if self.adapters else None
        return ForwardBatch(
            token_ids=_tensor(self.token_ids, np.int64),
            positions=_tensor(self.positions, np.int64),
            slots=_tensor(self.slots, np.int64),
            page_table=_tensor(self.page_table, np.int32).view(-1, self.width),
            query_lens=_array(self.query_lens, np.int32),
            context_lens=_array(self.context_lens, np.int32),
            query_starts=_array(self.query_starts, np.int32),
            output_indices=_tensor(self.output_indices, np.int64),
            adapters=adapters,
        )


class TakeLogits(msgspec.Struct, tag=1, array_like=True):
    """Multiply a number of rows in shared memory by the head."""

    count: int


class FindBest(msgspec.Struct, tag=2, array_like=True):
    """Find the most likely token for each of a number of rows in shared memory."""

    count: int


class End(msgspec.Struct, tag=3, array_like=True):
    """End the engine."""


class RunStep(msgspec.Struct, tag=4, array_like=True):
    """Run a step on ranks with devices, each of which has tables of its own. `plan`: as msgpack."""

    plan: memoryview

    @classmethod
    def from_plan(cls, plan: StepPlan) -> RunStep:
        """Make the message for a plan."""
        return cls(memoryview(_PLANS.encode(plan)))

    def step_plan(self) -> StepPlan:
        """Return the plan, in memory of its own."""
        return _PLAN.decode(self.plan)


class EndPhase(msgspec.Struct, tag=5, array_like=True):
    """End the phase of measuring steps."""


Command: TypeAlias = RunPass | TakeLogits | FindBest | End | RunStep | EndPhase


def _plain(value: object) -> bytes:
    assert isinstance(value, np.ndarray) and value.dtype == np.int32, "the arrays of a plan are int32"
    return value.tobytes()


_PLANS = msgspec.msgpack.Encoder(enc_hook=_plain)
_PLAN = msgspec.msgpack.Decoder(StepPlan, dec_hook=lambda _, data: np.frombuffer(data, np.int32).copy())


def _bytes(array: npt.NDArray[Any]) -> memoryview:
    return memoryview(array.tobytes())


def _array(data: memoryview, dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.frombuffer(data, dtype).copy()


def _tensor(data: memoryview, dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(_array(data, dtype))
