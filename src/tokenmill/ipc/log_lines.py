"""Log lines that are safe to show: no character in them ends the line, moves a cursor or turns the reading direction.

Text that a client sent can get into a message or into the text of an exception. A line feed in it would let the client
write lines of its own; an escape sequence would let it write to the terminal of the person who reads the log.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType

from tokenmill.ipc.standard_streams import lossy

FORMAT = "%(levelname)s %(name)s: %(message)s"
FORMAT_WITH_TIME = f"%(asctime)s {FORMAT}"

# Control characters, line and paragraph separators, marks of direction, halves of surrogate pairs.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_Exception = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def escaped(text: str) -> str:
    """Return the text with such characters as escapes: a line feed becomes a backslash and an n."""
    return _UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def escaped_json(text: str) -> str:
    """Return JSON that means the same, with such characters as escapes. JSON itself escapes those below the space."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


class LineFormatter(logging.Formatter):
    """Formats a message as one line; of an exception each frame has its own line, and so has each exception."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of the library
        """Return the line of the message."""
        return escaped(super().formatMessage(record).rstrip("\n"))

    def formatException(self, ei: _Exception) -> str:  # noqa: N802 - of the library
        """Return the traceback, all of it behind a bar, so that no part of it looks like a line of its own."""
        parts = traceback.format_exception(*ei)
        # A frame is a place and its source; all else is what the exception says, in one piece.
        lines = [
            line for part in parts for line in (part.splitlines() if part.startswith("  File ") else [part.strip("\n")])
        ]
        return "\n".join(f"  | {escaped(line)}" for line in lines)


class LineHandler(logging.Handler):
    """Hands each line to `write`, by default to standard error."""

    def __init__(self, form: str = FORMAT, write: Callable[[str], None] | None = None) -> None:
        """`form` is that of `logging.Formatter`."""
        super().__init__()
        self._write = write or partial(print, file=sys.stderr, flush=True)
        self.setFormatter(LineFormatter(form))

    def emit(self, record: logging.LogRecord) -> None:
        """Write each line of a log record."""
        try:
            for line in self.format(record).split("\n"):
                self._write(line)
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def logged(form: str = FORMAT, level: int = logging.WARNING) -> Iterator[None]:
    """Write this process's log to standard error, in lines, inside the context. Lines that cannot be written are lost.

    Args:
        form: see `LineHandler`.
        level: records below it are not written.
    """
    with lossy("stdout", "stderr"):
        logging.basicConfig(level=level, handlers=[LineHandler(form)])
        yield
