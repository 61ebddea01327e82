"""Match stop strings on a stream of text, across the borders of its deltas.

Knows text only; the caller ends the request after a match.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.core.errors import InvalidRequest

MAX_STOP_LENGTH = 1024


class StopStrings:
    """Finds the first stop string of a stream and holds back text that may become one.

    First means the one that is complete first, as if the text came character by character; of two that end at the
    same character, the one that begins first. So the result does not depend on how the text is cut into deltas.
    """

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        """Raises InvalidRequest for a stop string of more than `MAX_STOP_LENGTH` characters."""
        for stop in stops:
            if len(stop) > MAX_STOP_LENGTH:
                raise InvalidRequest(f"a stop string has {len(stop)} characters; at most {MAX_STOP_LENGTH}", "stop")
        self._stops = tuple(stops)
        self._include = include_in_output
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add a delta; return the text that may be shown now, and the stop string if one is complete."""
        if not self._stops:
            return text, None
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            end, begin, stop = match
            self._held = ""
            return text[: end if self._include else begin], stop
        num_held = self._num_to_hold(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def finish(self) -> str:
        """Return the text held back: it became no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        matches = ((text.find(stop), stop) for stop in self._stops)
        return min(((begin + len(stop), begin, stop) for begin, stop in matches if begin >= 0), default=None)

    def _num_to_hold(self, text: str) -> int:
        """Return the length of the longest end of `text` with which a stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
