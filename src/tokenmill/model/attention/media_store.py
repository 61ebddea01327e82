"""The contents of living requests' media: the gate that keeps them, and their bytes for an encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.media import MediaInput
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import RequestStatus
from tokenmill.model.attention.media_turns import TURNS_OF_TEXT, MediaTurns

if TYPE_CHECKING:
    import torch


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


def bytes_of(one: MediaInput) -> npt.NDArray[np.uint8]:
    """Return the bytes of a content, [m] uint8, in memory of their own."""
    return np.frombuffer(one.content, np.uint8).copy()


def content_of(one: MediaInput) -> torch.Tensor:
    """Return the same as a tensor of the host."""
    import torch

    return torch.from_numpy(bytes_of(one))
