"""A page of memory with a text worker's current work, which is still readable after the process was killed.

The page is a small file that the text worker maps and its supervisor reads. Each thread has a line of its own.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import msgspec

_LINE_BYTES = 128
_NUM_LINES = 8
_EMPTY = bytes(_LINE_BYTES)


class Work(msgspec.Struct, frozen=True):
    """One thread's work on a request: `did` is a participle, `id` the first id of the request's call."""

    did: str
    id: str


class WorkPage:
    """The text worker's end of the page, for writing."""

    def __init__(self, path: Path) -> None:
        with path.open("wb+") as file:
            file.truncate(_NUM_LINES * _LINE_BYTES)
            self._page = mmap.mmap(file.fileno(), _NUM_LINES * _LINE_BYTES)

    def write(self, line: int, did: str, request_id: str) -> None:
        """Note that this line's thread begins a stage of a request, e.g. `rendered`."""
        text = f"{did} {request_id}".encode()[:_LINE_BYTES].ljust(_LINE_BYTES, b"\0")
        self._page[line * _LINE_BYTES : (line + 1) * _LINE_BYTES] = text

    def clear(self, line: int) -> None:
        """Note that this line's thread is idle."""
        self._page[line * _LINE_BYTES : (line + 1) * _LINE_BYTES] = _EMPTY


def work_at_death(path: Path) -> list[Work]:
    """Return the work on a page, thread by thread, without torn lines; empty without a page."""
    try:
        page = path.read_bytes()
    except OSError:
        return []
    starts = range(0, len(page), _LINE_BYTES)
    words = [page[start : start + _LINE_BYTES].rstrip(b"\0").decode(errors="replace").split(" ") for start in starts]
    return [Work(*line) for line in words if len(line) == 2 and all(line)]
