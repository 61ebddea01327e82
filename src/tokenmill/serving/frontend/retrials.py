"""Prepare the suspects of the previous text worker's death one at a time, while other messages wait behind them.

Only then is the message in preparation at the next death known to be to blame for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tokenmill.core.messages import AbortRequests
from tokenmill.serving.frontend.prompt_processor import Question, ids_of

Waiting = tuple[Question | AbortRequests, int]
"""A message, and its size in bytes."""


class Retrials:
    """The queue of messages that wait for a retrial. It is empty, and costs nothing, while there are no suspects."""

    def __init__(self, clear: Callable[[list[str]], None]) -> None:
        """`clear`: called with the ids that are no longer suspect."""
        self._clear = clear
        self._suspects: set[str] = set()
        self._line: deque[Waiting] = deque()
        self._alone: str | None = None

    @property
    def holds_back(self) -> bool:
        """True while new messages must wait in the queue."""
        return bool(self._suspects or self._line)

    @property
    def is_on(self) -> bool:
        """True while the next message must be prepared alone."""
        return bool(self._suspects)

    def begin_trials(self, suspects: Iterable[str], ended: Sequence[str]) -> None:
        """Expect these suspects, and clear those whose requests have ended."""
        self._suspects.update(suspects)
        if ended:
            self._clear(list(ended))

    def wait(self, message: Question | AbortRequests, num_bytes: int) -> None:
        """Add a message to the end of the queue."""
        self._line.append((message, num_bytes))

    def abort(self, ids: Sequence[str]) -> None:
        """Remove aborted ids from the queue, and clear those of calls that are wholly aborted."""
        kept: deque[Waiting] = deque()
        gone: list[str] = []
        for message, num_bytes in self._line:
            own = [] if isinstance(message, AbortRequests) else ids_of(message)
            ended = [one for one in own if one in ids]
            if ended and len(ended) == len(own):
                gone.append(own[0])
                continue
            kept.append((message, num_bytes))
            if ended:
                kept.append((AbortRequests(ended), 0))
        self._line = kept
        self._acquit(gone)

    def next(self) -> Waiting | None:
        """Return the next message; None if the queue is empty or a message is being prepared alone."""
        return None if self._alone is not None or not self._line else self._line.popleft()

    def prepares(self, message: Question) -> None:
        """Note that a thread prepares this message: the next waits until `finished`."""
        self._alone = ids_of(message)[0]

    def finished(self, first_id: str) -> None:
        """Clear the call with this first id: it has been prepared without harm."""
        if first_id == self._alone:
            self._alone = None
        self._acquit([first_id])

    @property
    def alone(self) -> str | None:
        """First id of the call that a thread prepares while all others wait."""
        return self._alone

    def _acquit(self, ids: Iterable[str]) -> None:
        cleared = [one for one in ids if one in self._suspects]
        self._suspects.difference_update(cleared)
        if cleared:
            self._clear(cleared)
