"""The runner's part of media: outputs that the scheduler keeps, and inputs of a step.

Knows no towers: how a content becomes embeddings, and how its places turn the rotary embedding, is given to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tokenmill.core.media import MediaInput, MediaSpan
from tokenmill.core.plan import AdmittedRequest, StepPlan, StepResult
from tokenmill.model.attention.batch import ForwardBatch, MediaAngles, MediaTokens
from tokenmill.model.attention.media_store import MediaStore, bytes_of
from tokenmill.model.attention.media_turns import MediaTurns, Positions
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.model.kernels.heads import RotaryTables
from tokenmill.platform.arrays import AnyArray
from tokenmill.platform.host_arrays import library_of
from tokenmill.platform.tensor_memory import array_of

# Names of contents and outputs among the arrays of a step: this and their digest.
_CONTENT, _OUTPUT = "content ", "output "


class Encode(Protocol):
    """An encoder of one modality."""

    def __call__(self, one: MediaInput, content: torch.Tensor | None = None) -> torch.Tensor:
        """Return the embeddings of a content, [n, 1 + levels, hidden_size]; see `MediaTokens.embeddings`.

        Args:
            content: its bytes, [m] uint8, where the encoder is; None: they are copied there, which is waited for.
        """


class OutputSource(Protocol):
    """A place for encoder outputs outside of the engine. The thread that runs steps calls it."""

    def load(self, one: MediaInput) -> torch.Tensor | None:
        """Return the output of a content, on the host; None: it is not there after all. Its dtype is the encoder's."""

    def save(self, one: MediaInput, output: torch.Tensor) -> None:
        """Offer an output that was made here; it does not change any more."""


class NoSource(OutputSource):
    """The place of an engine that keeps its outputs to itself."""

    def load(self, one: MediaInput) -> None:
        """Return None."""

    def save(self, one: MediaInput, output: torch.Tensor) -> None:
        """Do nothing."""


class _Row(msgspec.Struct, frozen=True):
    """The media spans of a row's prompt, and the positions of the prompt's tokens."""

    media: tuple[MediaSpan, ...]
    positions: Positions
    shift: int


class _Shown(msgspec.Struct, frozen=True):
    """The part of a span that is among the tokens of a step: from `low` to `high` in its prompt.

    Attributes:
        number: of its request in the batch.
    """

    number: int
    span: MediaSpan
    low: int
    high: int

    @property
    def count(self) -> int:
        """Number of its tokens."""
        return self.high - self.low


class Encoder(RowExtension):
    """Encodes the media of plans, and gives steps the embeddings and positions of their tokens.

    Args:
        rotary: the tables of the text model; of one with several, whose media turn as text does, any of them. None: it
            has learned positions, and runs on the host.
        num_rows: of the engine; the device's tables have one more, that of padding.
        spans_see_ahead: see `Architecture`.
        stand_in: token that the model is told in the place of placeholders; None: these.

    Attributes:
        source: where outputs are loaded from and offered to.
        shifts: [num_rows + 1] int64 on the device: what is added to the place of a row's generated tokens, to rotate
            them by.
    """

    def __init__(
        self,
        encode: Encode,
        turns: MediaTurns,
        store: MediaStore,
        rotary: RotaryTables | None,
        num_rows: int,
        *,
        spans_see_ahead: bool = False,
        stand_in: int | None = None,
    ) -> None:
        self.source: OutputSource = NoSource()
        self._encode = encode
        self._turns = turns
        self._store = store
        self._rotary = rotary
        self._spans_see_ahead = spans_see_ahead
        self._stand_in = stand_in
        self._device = torch.device("cpu") if rotary is None else rotary.in_torch().cos.device
        self._axes = torch.from_numpy(turns.axes(0 if rotary is None else rotary.cos.shape[1])).to(self._device)
        self.shifts = torch.zeros(num_rows + 1, dtype=torch.int64, device=self._device)
        self._outputs: dict[str, torch.Tensor] = {}
        self._dtype = torch.uint8  # of outputs from outside
        self._made: deque[tuple[int, MediaInput, torch.Tensor]] = deque()  # with the steps that make them
        self._step = 0
        self._rows: dict[int, _Row] = {}

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in the new rows of a plan; return for the device these rows and their shifts, contents and outputs."""
        for new in plan.new_rows:
            self._rows.pop(new.row, None)
            if new.media:
                self._rows[new.row] = self._row(new)
        arrays = {_CONTENT + digest: bytes_of(self._store.find(digest)) for digest in plan.encode}
        for digest in plan.load:
            loaded = self.source.load(self._store.find(digest))
            if loaded is not None:
                arrays[_OUTPUT + digest], self._dtype = loaded.contiguous().view(torch.uint8).numpy(), loaded.dtype
        if not plan.new_rows:
            return arrays
        rows = [new.row for new in plan.new_rows]
        shifts = [self._rows[row].shift if row in self._rows else 0 for row in rows]
        return arrays | {"shifted_rows": np.array(rows, np.int64), "shifts": np.array(shifts, np.int64)}

    def split(self, plan: StepPlan, query_starts: npt.NDArray[np.int32], first: int) -> Arrays:
        """Return for the device the positions of a step with media, and where its placeholders are."""
        if not any(row in self._rows for row in plan.rows[first:].tolist()):
            return {}
        starts, begins = plan.num_computed[first:], query_starts[first:-1] - query_starts[first]
        counts = plan.num_scheduled[first:]
        of_text = np.repeat(starts - begins, counts) + np.arange(counts.sum())
        sights, places = of_text.astype(np.int32), [np.zeros(0, np.int64)]
        for shown in self._shown(plan, first):
            assert shown.high == shown.span.end or not self._spans_see_ahead, "no step ends within such a span"
            places.append(np.arange(shown.low, shown.high) + (begins - starts)[shown.number])
            sights[places[-1]] = shown.span.end - 1
        arrays: Arrays = {"media_places": np.concatenate(places).astype(np.int64)}
        if self._spans_see_ahead and len(places) > 1:
            arrays["media_sights"] = sights
        if self._turns.sections:
            arrays["media_positions"] = positions = np.tile(of_text.astype(np.int64), (3, 1))
            self._turn(positions, plan.rows[first:].tolist(), starts.tolist(), begins.tolist())
        return arrays

    def _turn(self, positions: Positions, rows: list[int], starts: list[int], begins: list[int]) -> None:
        """Put the positions of rows with media in the place of those of text, [3, T].

        Args:
            starts: of each row's tokens in its sequence. begins: the same among the T.
        """
        ends = [*begins[1:], positions.shape[1]]
        for row, start, begin, end in zip(rows, starts, begins, ends, strict=True):
            if (own := self._rows.get(row)) is not None:
                turn = begin + max(0, min(end - begin, own.positions.shape[1] - start))
                positions[:, begin:turn] = own.positions[:, start : start + turn - begin]
                positions[:, turn:end] += own.shift

    def apply(self, plan: StepPlan, sent: Sent) -> None:
        """Apply a plan on the device: set shifts, forget outputs, load them and encode contents."""
        if "shifted_rows" in sent:
            self.shifts[torch.as_tensor(sent["shifted_rows"])] = torch.as_tensor(sent["shifts"])
        for digest in plan.forget:
            self._outputs.pop(digest, None)
        self._step = plan.step
        for digest in plan.load:
            if (loaded := sent.get(_OUTPUT + digest)) is not None:  # in memory that later steps are sent to
                self._outputs[digest] = torch.as_tensor(loaded).clone().view(self._dtype)
        for digest in plan.encode:
            self._output(digest, torch.as_tensor(sent[_CONTENT + digest]))
        for digest in plan.load:
            self._output(digest)

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Add media embeddings and positions, if a request of the batch has media."""
        if "media_places" not in sent:
            return batch
        places, token_ids, angles, given = sent["media_places"], batch.token_ids, None, None
        if values := [
            self._output(one.span.digest)[one.low - one.span.offset :][: one.count] for one in self._shown(plan, first)
        ]:
            given = _like(token_ids, torch.cat(values))
        if self._turns.sections:
            assert self._rotary is not None, "sections are of its frequencies"
            angles = MediaAngles(sent["media_positions"], _like(token_ids, self._axes), self._rotary)
        if self._stand_in is not None and values:
            token_ids = library_of(token_ids).copy(token_ids)
            token_ids[places] = self._stand_in
        media = MediaTokens(angles, places, given, sent.get("media_sights"))
        return msgspec.structs.replace(batch, media=media, token_ids=token_ids)

    def ended(self, plan: StepPlan, result: StepResult) -> None:
        """Offer the outputs that a step has made: before its end they may not be there, on a device."""
        while self._made and self._made[0][0] <= plan.step:
            _, one, output = self._made.popleft()
            self.source.save(one, output)

    def extend_decodes(self, batch: ForwardBatch, rows: torch.Tensor) -> ForwardBatch:
        """Rotate generated tokens by their positions behind media."""
        return msgspec.structs.replace(batch, turned=batch.positions + self.shifts[rows])

    def forget(self) -> None:
        """Drop all outputs, of which nobody keeps count any more."""
        self._outputs.clear()
        self._made.clear()

    def _shown(self, plan: StepPlan, first: int) -> Iterator[_Shown]:
        """Yield the parts of media among the tokens of a plan's requests from the `first` on, in their order."""
        requests = plan.rows[first:].tolist(), plan.num_computed[first:].tolist(), plan.num_scheduled[first:].tolist()
        for number, (row, start, count) in enumerate(zip(*requests, strict=True)):
            for span in self._rows[row].media if row in self._rows else ():
                low, high = max(span.offset, start), min(span.end, start + count)
                if low < high:
                    yield _Shown(number, span, low, high)

    def _row(self, new: AdmittedRequest) -> _Row:
        return _Row(new.media, *self._turns.positions(new.num_prompt_tokens, new.media))

    def _output(self, digest: str, content: torch.Tensor | None = None) -> torch.Tensor:
        """Return the output of a content; `content`: its bytes on the device, see `Encode`."""
        # One that a failed step was to encode, or that was not outside any more, is missing and is encoded now: its
        # request has brought its content.
        if digest not in self._outputs:
            one = self._store.find(digest)
            self._outputs[digest] = self._encode(one, content)
            self._made.append((self._step, one, self._outputs[digest]))
        return self._outputs[digest]


def _like(array: AnyArray, tensor: torch.Tensor) -> AnyArray:
    """Return a tensor as an array where a batch has arrays, else on the device of the batch's tensors."""
    return array_of(tensor) if isinstance(array, np.ndarray) else tensor.to(array.device)
