"""The runner's part of vision: pixels of living requests, outputs that the scheduler keeps, and inputs of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.media import MediaInput, MediaSpan
from tokenmill.core.messages import AddRequest
from tokenmill.core.plan import AdmittedRequest, StepPlan
from tokenmill.core.request import RequestStatus
from tokenmill.model.attention.batch import MediaTokens
from tokenmill.model.kernels.heads import RotaryTables
from tokenmill.model.vision.positions import Positions, frequency_axes, prompt_positions
from tokenmill.model.vision.spec import VisionSpec
from tokenmill.model.vision.tower import Tower


class PixelStore:
    """The pixels of all images of living requests: a gate that lets every request through at once."""

    status = RequestStatus.WAITING

    def __init__(self) -> None:
        self._requests: dict[str, list[MediaInput]] = {}
        self._users: dict[str, dict[str, MediaInput]] = {}  # digest -> request -> one that shows it

    def admit(self, message: AddRequest) -> bool:
        """Keep the pixels that a request brings.

        Raises:
            InvalidRequest: its images lie over each other, or at the prompt's end.
        """
        end = 0
        for one in message.media:
            if one.span.offset < end or one.span.end >= len(message.prompt_token_ids):
                raise InvalidRequest("the placeholders of an image are out of place", "messages")
            end = one.span.end
        if message.media:
            self._requests[message.id] = message.media
            for one in message.media:
                self._users.setdefault(one.span.digest, {})[message.id] = one
        return True

    def collect(self, timeout: float) -> dict[str, InvalidRequest | None]:
        """Return nothing: no request waits here."""
        return {}

    def release(self, request_id: str) -> None:
        """Drop the pixels of a request that has ended."""
        for one in self._requests.pop(request_id, ()):
            users = self._users.get(one.span.digest, {})
            users.pop(request_id, None)
            if not users:
                self._users.pop(one.span.digest, None)

    def close(self) -> None:
        """Drop all pixels."""
        self._requests.clear()
        self._users.clear()

    def find(self, digest: str) -> MediaInput:
        """Return an image that a living request has brought."""
        return next(iter(self._users[digest].values()))


@dataclass(frozen=True, slots=True)
class _Row:
    """The media spans of a row's prompt, and the positions of the prompt's tokens."""

    media: tuple[MediaSpan, ...]
    positions: Positions
    shift: int


def _parts(row: _Row | None, start: int, stop: int) -> Iterator[tuple[int, int, MediaSpan]]:
    """Yield the parts of a row's images among its tokens from `start` on: where each begins and ends, and its image."""
    for span in () if row is None else row.media:
        low, high = max(span.offset, start), min(span.end, stop)
        if low < high:
            yield low, high, span


class Encoder:
    """Encodes the images of plans, and gives steps the embeddings and positions of their tokens.

    Args:
        rotary: the tables of the text model.
        num_rows: of the engine; the device's tables have one more, that of padding.

    Attributes:
        shifts: [num_rows + 1] int64 on the device: what is added to the place of a row's generated tokens, to rotate
            them by.
    """

    def __init__(self, spec: VisionSpec, tower: Tower, pixels: PixelStore, rotary: RotaryTables, num_rows: int) -> None:
        self._spec = spec
        self._tower = tower
        self._pixels = pixels
        self._rotary = rotary
        self._device = rotary.cos.device
        axes = frequency_axes(spec.sections, rotary.cos.shape[1], spec.is_interleaved)
        self._axes = torch.from_numpy(axes).to(self._device)
        self.shifts = torch.zeros(num_rows + 1, dtype=torch.int64, device=self._device)
        self._outputs: dict[str, torch.Tensor] = {}
        self._rows: dict[int, _Row] = {}

    def set(self, plan: StepPlan) -> dict[str, npt.NDArray[np.int64]]:
        """Take in the new rows of a plan; return what is to be sent to the device for `apply`."""
        for new in plan.new_rows:
            self._rows.pop(new.row, None)
            if new.media:
                self._rows[new.row] = self._row(new)
        if not plan.new_rows:
            return {}
        rows = [new.row for new in plan.new_rows]
        shifts = [self._rows[row].shift if row in self._rows else 0 for row in rows]
        return {"shifted_rows": np.array(rows, np.int64), "shifts": np.array(shifts, np.int64)}

    def apply(self, plan: StepPlan, sent: Mapping[str, torch.Tensor]) -> None:
        """Apply a plan on the device: set shifts, forget outputs and encode images."""
        if "shifted_rows" in sent:
            self.shifts[sent["shifted_rows"]] = sent["shifts"]
        for digest in plan.forget:
            self._outputs.pop(digest, None)
        for digest in plan.encode:
            self._output(digest)

    def step_arrays(
        self, plan: StepPlan, positions: npt.NDArray[np.int64], query_starts: npt.NDArray[np.int32], first_request: int
    ) -> dict[str, npt.NDArray[np.int64]]:
        """Return the arrays of `of_step`; nothing if all requests of the batch are text.

        Args:
            positions: [T], of the batch's tokens in their sequences. query_starts: [B + 1], of its requests.
            first_request: the requests of the plan before it are not in the batch.
        """
        rows = plan.rows[first_request:].tolist()
        if not any(row in self._rows for row in rows):
            return {}
        positions = np.tile(positions, (3, 1))
        indices = [np.zeros(0, dtype=np.int64)]
        for row, start, first, end in zip(
            rows, plan.num_computed[first_request:].tolist(), query_starts[:-1].tolist(), query_starts[1:].tolist(),
            strict=True,
        ):  # fmt: skip
            own = self._rows.get(row)
            if own is None:
                continue
            in_prompt = max(0, min(end - first, own.positions.shape[1] - start))
            positions[:, first : first + in_prompt] = own.positions[:, start : start + in_prompt]
            positions[:, first + in_prompt : end] += own.shift
            for low, high, _ in _parts(own, start, start + end - first):
                indices.append(np.arange(low - start + first, high - start + first))
        return {"media_positions": positions, "media_places": np.concatenate(indices)}

    def of_step(self, plan: StepPlan, sent: Mapping[str, torch.Tensor], first_request: int) -> MediaTokens | None:
        """Return the media embeddings and positions of a step's batch; None: all its requests are text.

        Args:
            sent: `step_arrays`, on the device.
        """
        if "media_positions" not in sent:
            return None
        values: list[torch.Tensor] = []
        step = zip(plan.rows.tolist(), plan.num_computed.tolist(), plan.num_scheduled.tolist(), strict=True)
        for row, start, count in [*step][first_request:]:
            for low, high, span in _parts(self._rows.get(row), start, start + count):
                values.append(self._output(span.digest)[low - span.offset : high - span.offset])
        embeddings = torch.cat(values) if values else None
        return MediaTokens(sent["media_positions"], self._axes, self._rotary, sent["media_places"], embeddings)

    def _row(self, new: AdmittedRequest) -> _Row:
        return _Row(new.media, *prompt_positions(new.num_prompt_tokens, new.media, self._spec.merge))

    def _output(self, digest: str) -> torch.Tensor:
        # One that a failed step was to encode is missing, and is encoded now: whoever needs it has brought its pixels.
        if digest not in self._outputs:
            one = self._pixels.find(digest)
            size = self._spec.patch_size
            shape = -1, one.span.rows * size, one.span.columns * size, 3
            self._outputs[digest] = self._tower.encode(np.frombuffer(one.pixels, np.uint8).reshape(shape).copy())
        return self._outputs[digest]
