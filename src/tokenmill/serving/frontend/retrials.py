"""Suspects of the death of the text worker before this one are prepared alone: others wait in line behind them.

Only so is who is being prepared at the next death known to be to blame for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tokenmill.core.messages import AbortRequests
from tokenmill.serving.frontend.prompt_processor import Question, ids_of

Waiting = tuple[Question | AbortRequests, int]
"""A message, and its size in bytes."""


class Retrials:
    """The line of those that wait. It is empty, and costs nothing, while nobody is under suspicion."""

    def __init__(self, clear: Callable[[list[str]], None]) -> None:
        """`clear`: told who is under suspicion no more."""
        self._clear = clear
        self._suspects: set[str] = set()
        self._line: deque[Waiting] = deque()
        self._alone: str | None = None

    @property
    def holds_back(self) -> bool:
        """Whether what comes must wait in line."""
        return bool(self._suspects or self._line)

    @property
    def is_on(self) -> bool:
        """Whether what is begun next must be prepared alone."""
        return bool(self._suspects)

    def begin(self, suspects: Iterable[str], ended: Sequence[str]) -> None:
        """These will come, and are tried; nobody waits for those that have ended."""
        self._suspects.update(suspects)
        if ended:
            self._clear(list(ended))

    def wait(self, message: Question | AbortRequests, num_bytes: int) -> None:
        """A message stands in line."""
        self._line.append((message, num_bytes))

    def abort(self, ids: Sequence[str]) -> None:
        """Nobody waits for these any more. Calls that have not had their turn lose it, wholly or in part."""
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
        """Whose turn it is; None: nobody waits, or who is being prepared must be alone."""
        return None if self._alone is not None or not self._line else self._line.popleft()

    def prepares(self, message: Question) -> None:
        """A thread has begun with this one: the next has to wait until `finished`."""
        self._alone = ids_of(message)[0]

    def finished(self, first_id: str) -> None:
        """A call has been prepared without harm, known by its first id."""
        if first_id == self._alone:
            self._alone = None
        self._acquit([first_id])

    @property
    def alone(self) -> str | None:
        """The call that a thread prepares while all others wait."""
        return self._alone

    def _acquit(self, ids: Iterable[str]) -> None:
        cleared = [one for one in ids if one in self._suspects]
        self._suspects.difference_update(cleared)
        if cleared:
            self._clear(cleared)
