"""The runner's part of media: contents of living requests, outputs that the scheduler keeps, and inputs of a step.

Knows no towers: how a content becomes embeddings, and how its places turn the rotary embedding, is given to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.media import MediaInput, MediaSpan
from tokenmill.core.messages import AddRequest
from tokenmill.core.plan import AdmittedRequest, StepPlan
from tokenmill.core.request import RequestStatus
from tokenmill.model.attention.batch import ForwardBatch, MediaAngles, MediaTokens
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.model.kernels.heads import RotaryTables
from tokenmill.platform.arrays import AnyArray
from tokenmill.platform.host_arrays import library_of
from tokenmill.platform.tensor_memory import array_of

Positions = npt.NDArray[np.int64]


Encode = Callable[[MediaInput], torch.Tensor]
"""A content -> its embeddings, [n, 1 + levels, hidden_size]; see `MediaTokens.embeddings`."""


class OutputSource(Protocol):
    """A place for encoder outputs outside of the engine. The thread that runs steps calls it."""

    def load(self, one: MediaInput) -> torch.Tensor | None:
        """Return the output of a content, on the host; None: it is not there after all."""

    def save(self, one: MediaInput, output: torch.Tensor) -> None:
        """Offer an output that was made here; it does not change any more."""


class NoSource(OutputSource):
    """The place of an engine that keeps its outputs to itself."""

    def load(self, one: MediaInput) -> None:
        """Return None."""

    def save(self, one: MediaInput, output: torch.Tensor) -> None:
        """Do nothing."""


class MediaTurns(msgspec.Struct, frozen=True, kw_only=True):
    """Places of media in the text model's rotary embedding; by default those of text.

    Attributes:
        sections: frequencies that turn by time, row and column; (): all by the place in the prompt.
        is_interleaved: these take turns; else they follow each other.
        merge: patches of a grid in each direction that are one embedding.
    """

    sections: tuple[int, int, int] | tuple[()] = ()
    is_interleaved: bool = True
    merge: int = 1

    def axes(self, num_frequencies: int) -> npt.NDArray[np.int64]:
        """Return the axis that each frequency turns by; see `frequency_axes`."""
        if not self.sections:
            return np.zeros(num_frequencies, dtype=np.int64)
        return frequency_axes(self.sections, num_frequencies, self.is_interleaved)

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> tuple[Positions, int]:
        """Return the positions of a prompt, and the shift of tokens behind it; see `prompt_positions`."""
        return prompt_positions(num_tokens, media if self.sections else (), self.merge)


TURNS_OF_TEXT = MediaTurns()


class MediaStore:
    """The contents of all media of living requests: a gate that lets every request through at once.

    Args:
        turns: where media of the model stand. num_positions: of its rotary embedding; 0: they are not counted.
    """

    status = RequestStatus.WAITING

    def __init__(self, turns: MediaTurns = TURNS_OF_TEXT, num_positions: int = 0) -> None:
        self._turns, self._num_positions = turns, num_positions
        self._requests: dict[str, list[MediaInput]] = {}
        self._users: dict[str, dict[str, MediaInput]] = {}  # digest -> request -> one that shows it

    def admit(self, message: AddRequest) -> bool:
        """Keep the contents that a request brings.

        Raises:
            InvalidRequest: its media lie over each other or at the prompt's end, or a video takes more time than the
                model has positions for.
        """
        end = 0
        for one in message.media:
            if one.span.offset < end or one.span.end >= len(message.prompt_token_ids):
                raise InvalidRequest(f"the placeholders of {one.span.noun} are out of place", "messages")
            end = one.span.end
        if any(one.span.time for one in message.media):
            self._check_positions(message)
        if message.media:
            self._requests[message.id] = message.media
            for one in message.media:
                self._users.setdefault(one.span.digest, {})[message.id] = one
        return True

    def _check_positions(self, message: AddRequest) -> None:
        count = len(message.prompt_token_ids)
        positions, shift = self._turns.positions(count, [one.span for one in message.media])
        # Without a limit answers end with the context, which has no more tokens than there are positions.
        most = count + message.params.max_tokens if message.params.max_tokens else self._num_positions
        needed = max(int(positions.max()) + 1, most + shift)
        if needed > self._num_positions:
            raise InvalidRequest(
                f"the times of a video and {most} tokens need {needed} positions, and the model has "
                f"{self._num_positions}: ask for fewer max_tokens, or say more frames a second (fps)",
                "messages",
            )

    def collect(self, timeout: float) -> dict[str, InvalidRequest | None]:
        """Return nothing: no request waits here."""
        return {}

    def release(self, request_id: str) -> None:
        """Drop the contents of a request that has ended."""
        for one in self._requests.pop(request_id, ()):
            users = self._users.get(one.span.digest, {})
            users.pop(request_id, None)
            if not users:
                self._users.pop(one.span.digest, None)

    def close(self) -> None:
        """Drop all contents."""
        self._requests.clear()
        self._users.clear()

    def find(self, digest: str) -> MediaInput:
        """Return a content that a living request has brought."""
        return next(iter(self._users[digest].values()))


class _Row(msgspec.Struct, frozen=True):
    """The media spans of a row's prompt, and the positions of the prompt's tokens."""

    media: tuple[MediaSpan, ...]
    positions: Positions
    shift: int


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
        self._rows: dict[int, _Row] = {}

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in the new rows of a plan; return these rows and their shifts for the device."""
        for new in plan.new_rows:
            self._rows.pop(new.row, None)
            if new.media:
                self._rows[new.row] = self._row(new)
        if not plan.new_rows:
            return {}
        rows = [new.row for new in plan.new_rows]
        shifts = [self._rows[row].shift if row in self._rows else 0 for row in rows]
        return {"shifted_rows": np.array(rows, np.int64), "shifts": np.array(shifts, np.int64)}

    def apply(self, plan: StepPlan, sent: Sent) -> None:
        """Apply a plan on the device: set shifts, forget outputs, load them and encode contents."""
        if "shifted_rows" in sent:
            self.shifts[torch.as_tensor(sent["shifted_rows"])] = torch.as_tensor(sent["shifts"])
        for digest in plan.forget:
            self._outputs.pop(digest, None)
        for digest in plan.load:
            loaded = self.source.load(self._store.find(digest))
            if loaded is not None:
                self._outputs[digest] = loaded.to(self._device)
        for digest in (*plan.encode, *plan.load):
            self._output(digest)

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Add media embeddings and positions, if a request of the batch has media."""
        rows = plan.rows[first:].tolist()
        if not any(row in self._rows for row in rows):
            return batch
        media = self._media(batch, rows, plan.num_computed[first:].tolist(), arrays["positions"])
        token_ids = batch.token_ids
        if self._stand_in is not None and media.embeddings is not None:
            token_ids = library_of(token_ids).copy(token_ids)
            token_ids[media.indices] = self._stand_in
        return msgspec.structs.replace(batch, media=media, token_ids=token_ids)

    def extend_decodes(self, batch: ForwardBatch, rows: torch.Tensor) -> ForwardBatch:
        """Rotate generated tokens by their positions behind media."""
        return msgspec.structs.replace(batch, turned=batch.positions + self.shifts[rows])

    def _media(
        self, batch: ForwardBatch, rows: list[int], computed: list[int], positions: npt.NDArray[np.int64]
    ) -> MediaTokens:
        """Return the media embeddings and positions of a batch.

        Args:
            rows, computed: of its requests; `computed`: where each begins.
            positions: [T], of its tokens in their sequences, on the host.
        """
        sights = positions.astype(np.int32)
        positions = np.tile(positions, (3, 1))
        indices: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        spans = zip(rows, computed, batch.query_starts.tolist(), batch.query_lens.tolist(), strict=False)
        for row, start, first, count in spans:
            own = self._rows.get(row)
            if own is None:
                continue
            in_prompt = max(0, min(count, own.positions.shape[1] - start))
            positions[:, first : first + in_prompt] = own.positions[:, start : start + in_prompt]
            positions[:, first + in_prompt : first + count] += own.shift
            for span in own.media:
                low, high = max(span.offset, start), min(span.end, start + count)
                if low < high:
                    indices.append(torch.arange(low - start + first, high - start + first))
                    values.append(self._output(span.digest)[low - span.offset : high - span.offset])
                    assert high == span.end or not self._spans_see_ahead, "no step ends within such a span"
                    sights[low - start + first : high - start + first] = span.end - 1
        places = torch.cat(indices) if indices else torch.zeros(0, dtype=torch.int64)
        like = partial(_like, batch.token_ids)
        angles = None
        if self._turns.sections:
            assert self._rotary is not None, "sections are of its frequencies"
            angles = MediaAngles(like(torch.from_numpy(positions)), like(self._axes), self._rotary)
        given = like(torch.cat(values)) if values else None
        seen = like(torch.from_numpy(sights)) if values and self._spans_see_ahead else None
        return MediaTokens(angles, like(places), given, seen)

    def _row(self, new: AdmittedRequest) -> _Row:
        return _Row(new.media, *self._turns.positions(new.num_prompt_tokens, new.media))

    def _output(self, digest: str) -> torch.Tensor:
        # One that a failed step was to encode, or that was not outside any more, is missing and is encoded now: its
        # request has brought its content.
        if digest not in self._outputs:
            content = self._store.find(digest)
            self._outputs[digest] = self._encode(content)
            self.source.save(content, self._outputs[digest])
        return self._outputs[digest]


def _like(array: AnyArray, tensor: torch.Tensor) -> AnyArray:
    """Return a tensor as an array where a batch has arrays, else on the device of the batch's tensors."""
    return array_of(tensor) if isinstance(array, np.ndarray) else tensor.to(array.device)


def prompt_positions(num_tokens: int, media: Sequence[MediaSpan], merge: int) -> tuple[Positions, int]:
    """Return positions [3, num_tokens] of a prompt, of time, row and column, and the shift of tokens behind it.

    Text goes on along all three axes at once. An image stands at one time, its embeddings at their rows and columns
    from there on, and the text behind it goes on behind its longer side (Qwen2-VL's rule, with time not in frames).
    Frames of a video whose times are positions stand at their own, all at rows and columns from where the video begins;
    text goes on behind the largest position of all (Qwen2.5-VL's rule as its makers and vLLM have it; transformers
    since 5.3 lets text go on behind the longer side, however long the video is).

    Args:
        media: in the order of their places, none over another.
        merge: patches of a grid in each direction that are one embedding.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    done = shift = start = last = 0
    for span in media:
        positions[:, done : span.offset] = np.arange(done, span.offset) + shift
        rows, columns = span.rows // merge, span.columns // merge
        if not span.before:
            start = last = span.offset + shift
        positions[0, span.offset : span.end] = start + span.time
        positions[1, span.offset : span.end] = start + np.repeat(np.arange(rows), columns)
        positions[2, span.offset : span.end] = start + np.tile(np.arange(columns), rows)
        last = max(last, start + span.time, start + max(rows, columns) - 1)
        done, shift = span.end, last + 1 - span.end
    positions[:, done:] = np.arange(done, num_tokens) + shift
    return positions, shift


def frequency_axes(
    sections: tuple[int, int, int], num_frequencies: int, is_interleaved: bool = True
) -> npt.NDArray[np.int64]:
    """Return [num_frequencies], the axis that each frequency of the rotary embedding turns by: 0 time, 1 row, 2 column.

    Interleaved, every axis has fast and slow ones, and what sections leave over is time's. Else they follow each other.
    """
    if not is_interleaved:
        return np.repeat(np.arange(3), sections)
    index = np.arange(num_frequencies)
    axes = np.zeros(num_frequencies, dtype=np.int64)
    for axis in (1, 2):
        axes[(index % 3 == axis) & (index < 3 * sections[axis])] = axis
    return axes
