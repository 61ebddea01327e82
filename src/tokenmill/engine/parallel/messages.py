"""Messages that rank 0 posts to the other ranks: msgpack structs, arrays as their bytes.

On CPUs a message is one pass, or one use of the head. A pass is a step's batch: the plan as rank 0 has applied it to
its tables. So the others keep no tables that could come to differ, and need not be told which tokens were sampled: they
find them in the next batch. On devices, which are ahead of their hosts, a message is the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import StepPlan
from tokenmill.model.attention.batch import ForwardBatch, MediaAngles, MediaTokens
from tokenmill.model.kernels.adapters import Adapter, AdapterRows, AdapterSource
from tokenmill.platform.host_arrays import host_array

if TYPE_CHECKING:
    from tokenmill.model.kernels.heads import RotaryTables
    from tokenmill.platform.arrays import Array

_NOTHING = memoryview(b"")


class SentMedia(msgspec.Struct, array_like=True):
    """Images and sound of a pass; see `MediaTokens`. What is empty is absent there.

    Attributes:
        shape, dtype: of the embeddings.
        positions, axes: see `MediaAngles`, whose tables each rank has.
    """

    indices: memoryview
    embeddings: memoryview
    shape: tuple[int, ...]
    dtype: str
    positions: memoryview
    axes: memoryview
    sights: memoryview

    @classmethod
    def from_tokens(cls, media: MediaTokens) -> SentMedia:
        """Make the part of a message for the media of a batch on the CPU."""
        angles, embeddings = media.angles, media.embeddings
        given = np.zeros(0, np.float32) if embeddings is None else host_array(embeddings)
        positions, axes = (_NOTHING, _NOTHING) if angles is None else map(_bytes, (angles.positions, angles.axes))
        sights = _NOTHING if media.sights is None else _bytes(media.sights)
        return cls(_bytes(media.indices), _bytes(given), given.shape, given.dtype.name, positions, axes, sights)

    def tokens(self, rotary: RotaryTables) -> MediaTokens:
        """Return the media of a batch, in memory of their own. `rotary`: this rank's tables."""
        angles = None
        if self.axes:
            angles = MediaAngles(_array(self.positions, np.int64).reshape(3, -1), _array(self.axes, np.int64), rotary)
        given = _array(self.embeddings, np.dtype(self.dtype)).reshape(self.shape) if self.embeddings else None
        sights = _array(self.sights, np.int32) if self.sights else None
        return MediaTokens(angles, _array(self.indices, np.int64), given, sights)


class RunPass(msgspec.Struct, tag=0, array_like=True):
    """Run the layers over the tokens of a batch; see `ForwardBatch`.

    Attributes:
        width: pages in a row of the page table.
        adapters, of_row: see `AdapterRows`.
        media: None: all tokens are text.
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
    media: SentMedia | None = None

    @classmethod
    def from_batch(cls, batch: ForwardBatch) -> RunPass:
        """Make the message for a batch on the CPU."""
        return cls(
            _bytes(batch.token_ids),
            _bytes(batch.positions),
            _bytes(batch.slots),
            _bytes(batch.page_table),
            batch.page_table.shape[1],
            _bytes(batch.query_lens),
            _bytes(batch.context_lens),
            _bytes(batch.query_starts),
            _bytes(batch.output_indices),
            [] if batch.adapters is None else list(batch.adapters.sources),
            _NOTHING if batch.adapters is None else _bytes(batch.adapters.of_row),
            None if batch.media is None else SentMedia.from_tokens(batch.media),
        )

    def behind_embeddings(self) -> RunPass:
        """Return the message for stages after the first: what is embedded is in the hidden states that they get."""
        if self.media is None or not self.media.embeddings:
            return self
        media = msgspec.structs.replace(self.media, indices=_NOTHING, embeddings=_NOTHING)
        return msgspec.structs.replace(self, media=media)

    def batch(
        self, find: Callable[[Sequence[AdapterSource]], tuple[Adapter, ...]], rotary: RotaryTables | None = None
    ) -> ForwardBatch:
        """Return the batch, in memory of its own.

        Args:
            find: returns this rank's parts of adapters. rotary: its tables, for media.
        """
        adapters = AdapterRows(find(self.adapters), _array(self.of_row, np.int32)) if self.adapters else None
        return ForwardBatch(
            token_ids=_array(self.token_ids, np.int64),
            positions=_array(self.positions, np.int64),
            slots=_array(self.slots, np.int64),
            page_table=_array(self.page_table, np.int32).reshape(-1, self.width),
            query_lens=_array(self.query_lens, np.int32),
            context_lens=_array(self.context_lens, np.int32),
            query_starts=_array(self.query_starts, np.int32),
            output_indices=_array(self.output_indices, np.int64),
            adapters=adapters,
            media=None if self.media is None or rotary is None else self.media.tokens(rotary),
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


class TakeOutputs(msgspec.Struct, tag=6, array_like=True):
    """Take the outputs of a step from the last stage and sample, as rank 0 does now. `number`: of the step's pass."""

    number: int


Command: TypeAlias = RunPass | TakeLogits | FindBest | End | RunStep | EndPhase | TakeOutputs


def _plain(value: object) -> bytes:
    assert isinstance(value, np.ndarray) and value.dtype == np.int32, "the arrays of a plan are int32"
    return value.tobytes()


_PLANS = msgspec.msgpack.Encoder(enc_hook=_plain)
_PLAN = msgspec.msgpack.Decoder(StepPlan, dec_hook=lambda _, data: np.frombuffer(data, np.int32).copy())


def _bytes(array: Array) -> memoryview:
    return memoryview(host_array(array).tobytes())


def _array(data: memoryview, dtype: type[np.generic] | np.dtype[Any]) -> npt.NDArray[Any]:
    return np.frombuffer(data, dtype).copy()
