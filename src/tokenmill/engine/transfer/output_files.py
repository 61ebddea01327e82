"""Encoder outputs outside the engine that made them: one file for each in a folder that several engines share.

    FOLDER/<name>.output    |header, a line of JSON|numbers|

The name is a hash of the content and of all that its numbers depend on, so equal names mean equal bytes and a writer
never changes a file. It writes beside it and renames: readers take no lock and see a file whole or not at all. What a
writer leaves that dies is removed by the next one, and the least recently used files go where the limit is exceeded.
Numbers that were changed have another checksum: a miss, as in `SlotFile`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Protocol

import msgspec

from tokenmill.core.regular_file import open_regular
from tokenmill.core.whole_file import whole_file
from tokenmill.engine.transfer.checksum import find_checksum

VERSION = 1
SUFFIX = ".output"
# A file that is still being written is not so old.
ABANDONED_SECONDS = 60.0
_MOST_HEADER = 1024
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class OutputHeader(msgspec.Struct, frozen=True):
    """The first line of a packed output. `own`: checksum of the header without it; `numbers`: of what follows."""

    version: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str
    numbers: int
    own: int = 0


def output_name(whose: str, digest: str) -> str:
    """Return the name of an output: 32 hexadecimal digits.

    Args:
        whose: names the encoder: its weights, its types, its kernels and the release. digest: of the content.
    """
    return blake2b(f"{whose}/{digest}".encode(), digest_size=16).hexdigest()


def pack(name: str, dtype: str, shape: tuple[int, ...], numbers: memoryview) -> bytes:
    """Return an output with its header. `numbers`: its bytes, little-endian."""
    kind, checksum = find_checksum()
    header = OutputHeader(VERSION, name, dtype, shape, kind, checksum(numbers))
    own = checksum(memoryview(msgspec.json.encode(header)))
    return msgspec.json.encode(msgspec.structs.replace(header, own=own)) + b"\n" + numbers


def unpack(name: str, data: bytes | bytearray) -> tuple[OutputHeader, memoryview] | None:
    """Return header and numbers of an output; None: it is another one, was damaged, or is of another release."""
    end = data.find(b"\n", 0, _MOST_HEADER)
    kind, checksum = find_checksum()
    try:
        header = msgspec.json.decode(memoryview(data)[: max(0, end)], type=OutputHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    numbers = memoryview(data)[end + 1 :]
    bare = msgspec.json.encode(msgspec.structs.replace(header, own=0))
    if (header.version, header.name, header.checksum) != (VERSION, name, kind):
        return None
    if header.own != checksum(memoryview(bare)) or header.dtype not in ITEM_BYTES:
        return None
    if len(numbers) != ITEM_BYTES[header.dtype] * prod(header.shape) or header.numbers != checksum(numbers):
        return None
    return header, numbers


class OutputStore(Protocol):
    """A place for packed outputs by name. Any thread calls it; what is there may be gone at the next call."""

    def has(self, name: str) -> bool:
        """Return True if an output is there, which counts as a use of it."""

    def read(self, name: str) -> bytearray | None:
        """Return a packed output; None: it is not there."""

    def write(self, name: str, data: bytes) -> None:
        """Keep an output, perhaps in the room of others.

        Raises:
            OSError: the disk is full or broken.
        """

    def remove(self, name: str) -> None:
        """Forget an output that turned out to be damaged."""


class OutputMemory:
    """A store in memory, for an engine that shares it with nobody. `limit`: bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_bytes = 0
        self._outputs: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def has(self, name: str) -> bool:
        """See `OutputStore`."""
        with self._lock:
            if name in self._outputs:
                self._outputs.move_to_end(name)
            return name in self._outputs

    def read(self, name: str) -> bytearray | None:
        """See `OutputStore`."""
        with self._lock:
            data = self._outputs.get(name)
        return None if data is None else bytearray(data)

    def write(self, name: str, data: bytes) -> None:
        """See `OutputStore`."""
        self.remove(name)
        with self._lock:
            if len(data) > self._limit:
                return
            self._outputs[name] = data
            self._num_bytes += len(data)
            while self._num_bytes > self._limit:
                self._num_bytes -= len(self._outputs.popitem(last=False)[1])

    def remove(self, name: str) -> None:
        """See `OutputStore`."""
        with self._lock:
            self._num_bytes -= len(self._outputs.pop(name, b""))


class OutputFolder:
    """A store in a folder that engines of one user share."""

    def __init__(self, folder: Path, limit: int) -> None:
        """Make the folder where there is none. `limit`: bytes of all files, whoever wrote them.

        Raises:
            OSError: it cannot be made, or is not this user's alone.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{folder} is not a folder of this user alone")
        self._folder = folder
        self._limit = limit

    def has(self, name: str) -> bool:
        """See `OutputStore`."""
        try:
            os.utime(self._path(name), follow_symlinks=False)
        except OSError:
            return False
        return True

    def read(self, name: str) -> bytearray | None:
        """See `OutputStore`. Read by calls: touching mapped memory of a file on a broken disk kills the process."""
        try:
            with open_regular(self._path(name)) as file:
                return bytearray(file.read(self._limit))
        except OSError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """See `OutputStore`."""
        if len(data) > self._limit:
            return
        with whole_file(self._path(name), 0o600) as file:
            file.write(data)
        self._trim()

    def remove(self, name: str) -> None:
        """See `OutputStore`."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"

    def _trim(self) -> None:
        """Remove what writers have left that died, and the least recently used files beyond the limit.

        Engines may do so at once: each counts what is there, and a file that is gone already is no matter.
        """
        used = 0
        for changed, size, path in sorted(self._files(), reverse=True):
            used += size
            is_new = path.name.startswith(".")
            if changed < time.time() - ABANDONED_SECONDS if is_new else used > self._limit:
                path.unlink(missing_ok=True)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield when each file was last used, its bytes and its path."""
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if SUFFIX not in entry.name or not entry.is_file(follow_symlinks=False):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield status.st_mtime, status.st_size, Path(entry.path)
