"""What a text worker is at, on a page of memory: it says what it said when the process was killed.

The page is a small file that the text worker maps and its supervisor reads. Each of its threads has a line of its own.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

_LINE_BYTES = 128
_NUM_LINES = 8
_EMPTY = bytes(_LINE_BYTES)


@dataclass(frozen=True, slots=True)
class Work:
    """One thread `did` something to a request: `id` is the first of its call."""

    did: str
    id: str


class WorkPage:
    """The text worker's end of the page."""

    def __init__(self, path: Path) -> None:
        with path.open("wb+") as file:
            file.truncate(_NUM_LINES * _LINE_BYTES)
            self._page = mmap.mmap(file.fileno(), _NUM_LINES * _LINE_BYTES)

    def write(self, line: int, did: str, request_id: str) -> None:
        """The thread of this line begins, e.g. `rendered`, a request."""
        text = f"{did} {request_id}".encode()[:_LINE_BYTES].ljust(_LINE_BYTES, b"\0")
        self._page[line * _LINE_BYTES : (line + 1) * _LINE_BYTES] = text

    def clear(self, line: int) -> None:
        """The thread of this line is at nothing."""
        self._page[line * _LINE_BYTES : (line + 1) * _LINE_BYTES] = _EMPTY


def work_at_death(path: Path) -> list[Work]:
    """What a page says, thread by thread; nothing where there is no page, nor of a line that is torn."""
    try:
        page = path.read_bytes()
    except OSError:
        return []
    starts = range(0, len(page), _LINE_BYTES)
    words = [page[start : start + _LINE_BYTES].rstrip(b"\0").decode(errors="replace").split(" ") for start in starts]
    return [Work(*line) for line in words if len(line) == 2 and all(line)]
