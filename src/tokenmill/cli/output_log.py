"""The output file of `tokenmill generate`: lines are only appended, so the next run goes on wherever a run ended.

An incomplete line does not count: bytes after the last line break are dropped at the next start and written again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.core.whole_file import whole_file

SYNC_SECONDS = 2.0
# Every line begins so; only a file that does is cut at its last line break.
LINE_START = b'{"line":'


class _Response(msgspec.Struct):
    """The part of a batch line's answer that tells whether it is one."""

    status_code: int = 200


class _Written(msgspec.Struct):
    """The fields of an output line that resuming needs."""

    line: int
    input: str
    error: Any = None
    response: _Response | None = None

    @property
    def is_answer(self) -> bool:
        """False if the line holds an error instead of an answer."""
        return self.error is None and (self.response is None or self.response.status_code == HTTPStatus.OK)


class OutputLog:
    """Appends output lines and knows which input lines have one.

    Attributes:
        done: input line number -> digest of that line, for every line of the file.
        num_errors: lines with an error instead of an answer.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        """Open or create the file, and lock it against a second run.

        Raises:
            InvalidConfig: it cannot be written, another run writes it, or it is no output file.
        """
        self._path = path
        try:
            self._file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise InvalidConfig(f"cannot write {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise InvalidConfig(f"another run is writing {path}") from None
        if overwrite:
            self._file.truncate(0)
        self.done: dict[int, str] = {}
        self.num_errors = 0
        self._in_order = True
        self._highest = 0
        self._last_sync = time.monotonic()
        self._read()

    def __enter__(self) -> OutputLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def append(self, document: dict[str, Any]) -> None:
        """Write one line. It survives the end of this process at once, and of the machine two seconds later.

        Raises:
            TokenMillError: it cannot be written; no part of it remains.
        """
        encoded = msgspec.json.encode(document)
        # One write of the whole line: a reader, or the next run, sees all of it or a part without a line break.
        data, size = memoryview(encoded + b"\n"), self._file.tell()
        with self._writing():
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                self._file.seek(size)
                self._file.truncate()
                raise
            if time.monotonic() - self._last_sync > SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._last_sync = time.monotonic()
        self._note(_parse(encoded))

    def sort(self) -> None:
        """Sort the lines into the order of the input; they were written as they were finished.

        Raises:
            TokenMillError: there is no room for that; the lines stay as they are.
        """
        if self._in_order:
            return
        self._file.seek(0)
        lines = sorted(self._file.readall().splitlines(keepends=True), key=lambda raw: _parse(raw).line)
        with self._writing(), whole_file(self._path) as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TokenMillError(
                f"cannot write {self._path}: {error.strerror}; run the same command again to continue"
            ) from None

    def _read(self) -> None:
        content = self._file.readall()
        whole = content[: content.rfind(b"\n") + 1]
        for number, raw in enumerate(whole.split(b"\n")[:-1], 1):
            try:
                written = _parse(raw)
            except msgspec.MsgspecError:
                raise self._foreign(f"line {number} is not an output line") from None
            if written.line in self.done:
                raise self._foreign(f"input line {written.line} is answered twice")
            self._note(written)
        torn = content[len(whole) :]
        if not (torn.startswith(LINE_START) or LINE_START.startswith(torn)):
            raise self._foreign("its last line is not an output line")
        self._file.truncate(len(whole))
        self._file.seek(len(whole))

    def _note(self, written: _Written) -> None:
        self._in_order = self._in_order and written.line > self._highest
        self._highest = max(self._highest, written.line)
        self.done[written.line] = written.input
        self.num_errors += not written.is_answer

    def _foreign(self, what: str) -> InvalidConfig:
        return InvalidConfig(f"{self._path}: {what}; name another --output, or give --overwrite")


def _parse(raw: bytes) -> _Written:
    return msgspec.json.decode(raw, type=_Written)
