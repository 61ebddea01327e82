"""Standard output and standard error of a process that must go on even when its log cannot be written.

The reader of the log may have ended (EPIPE) or may live without reading; the disk below it may be full (ENOSPC) or
broken (EIO). A line that cannot be written now is dropped and counted: it never raises and never makes its writer wait.
The queue is the system's: a pipe holds 64 KiB, so a reader that is only slow loses nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TextIO, cast

# What a pipe or a socket that is ready takes without making its writer wait (PIPE_BUF of Linux).
_READY_BYTES = 4096
# A line that has no end yet is kept back, up to so many characters.
_MOST_KEPT = 1 << 20


class LossyStream(io.TextIOBase):
    """Writes text to another stream now or never. Lines are whole; a line that was cut is ended before the next begins.

    Attributes:
        num_lost: lines that could not be written.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """`stream`: with a descriptor or without; None: all is lost."""
        self.num_lost = 0
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._lock = threading.RLock()  # a finalizer may print while its own thread does
        self._kept = ""
        self._is_cut = False
        self._own: int | None = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            cast(TextIO, stream).flush()
        self._take = self._way()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Encoding of the other stream."""
        return self._encoding

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return True if the other stream is a terminal."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return cast(TextIO, self._stream).isatty()
        return False

    def fileno(self) -> int:
        """Return the descriptor of the other stream; raise OSError where there is none."""
        if self._stream is None:
            raise io.UnsupportedOperation("there is no stream")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write the lines that are complete, and keep the rest until its line feed comes, or until `flush`."""
        with self._lock:
            kept = self._kept + text
            end = len(kept) if len(kept) > _MOST_KEPT else kept.rfind("\n") + 1
            self._kept = kept[end:]
            self._send(kept[:end])
        return len(text)

    def flush(self) -> None:
        """Write what was kept back."""
        with self._lock:
            kept, self._kept = self._kept, ""
            self._send(kept)

    def close(self) -> None:
        """Close what was opened here; the other stream stays open."""
        if not self.closed:
            super().close()
            if self._own is not None:
                os.close(self._own)

    def _send(self, text: str) -> None:
        if not text:
            return
        data = text.encode(self._encoding, "backslashreplace")
        if self._is_cut:
            self._is_cut = not self._take_most(b"\n")
        sent = 0 if self._is_cut else self._take_most(data)
        if rest := data[sent:]:
            is_whole = sent > 0 and rest.startswith(b"\n")  # only its end is missing, which comes before the next line
            self.num_lost += rest.count(b"\n") + (not rest.endswith(b"\n")) - is_whole
            self._is_cut = self._is_cut or data[sent - 1 : sent] not in (b"", b"\n")

    def _take_most(self, data: bytes) -> int:
        """Write these bytes from the first on, and return how many were taken."""
        sent = 0
        with contextlib.suppress(OSError, ValueError):
            while sent < len(data) and (taken := self._take(data[sent:])):
                sent += taken
        return sent

    def _way(self) -> Callable[[bytes], int]:
        """Return a function that takes bytes without waiting and returns how many; OSError or ValueError: none."""
        try:
            descriptor = self.fileno()
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except (OSError, ValueError):
            return self._give
        if is_file:
            return partial(os.write, descriptor)
        try:
            # Opened once more: other holders of this pipe or terminal did not ask for one that never waits.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            self._own = os.open(f"/proc/self/fd/{descriptor}", flags)
        except OSError:  # a socket, or another system
            return partial(_write_if_ready, descriptor)
        return partial(os.write, self._own)

    def _give(self, data: bytes) -> int:
        if self._stream is None:
            raise ValueError("there is no stream")
        self._stream.write(data.decode(self._encoding))
        self._stream.flush()
        return len(data)


def _write_if_ready(descriptor: int, data: bytes) -> int:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return os.write(descriptor, data[:_READY_BYTES]) if poll.poll(0) else 0


@contextlib.contextmanager
def lossy(*names: str) -> Iterator[None]:
    """Make these of `sys.stdout` and `sys.stderr` streams that never raise and never wait, inside the context."""
    before = {name: getattr(sys, name) for name in names}
    made = {name: LossyStream(one) for name, one in before.items() if not isinstance(one, LossyStream)}
    for name, stream in made.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in made.items():
            stream.flush()
            setattr(sys, name, before[name])


def num_lost_lines() -> int:
    """Return the number of lines that this process has lost."""
    return sum(stream.num_lost for stream in (sys.stdout, sys.stderr) if isinstance(stream, LossyStream))


def reopen_closed() -> None:
    """Open /dev/null for those of descriptors 0, 1 and 2 that were closed at the start.

    Otherwise the next file to be opened would get such a number, and printed text would go to a socket or a file.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == number, "the lowest number that is free is given"
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
