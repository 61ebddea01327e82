"""Keep complete responses in a folder, bounded in bytes, so that they outlive the process that made them.

    FOLDER/<owner, a hash; "open" where there are no keys>/<id of a response>.json

A file is whole or absent; several servers may share a folder. When there is no room, the owner that holds most loses
its least recently used responses. All calls wait for the disk.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidConfig

MAX_BYTES = 256 * 2**20
# The folder is looked through at the first response and, since others may write there, after so many more.
_LOOK_EVERY = 256
_ROOM = 0.9  # what is left of `max_bytes` by a clean-up, so that not each response makes one
_ID = re.compile(r"resp_[0-9a-f]{1,64}")
_OWNER = re.compile(r"[0-9a-f]{1,64}")
_OPEN = "open"


_COMPLETE = frozenset({"completed", "incomplete", "failed", "cancelled"})


class StoredResponse(msgspec.Struct, frozen=True):
    """One response; `messages` is the chat up to its answer without instructions, `num_bytes` its size."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    num_bytes: int

    @property
    def is_complete(self) -> bool:
        """True once nothing will be added to it."""
        return self.response.get("status") in _COMPLETE


class ResponseFiles:
    """Responses as files below a folder, which is made if need be; one of over a quarter of the room is not kept.

    Raises:
        InvalidConfig: nothing can be written there.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._until_look = 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = folder / f".{os.getpid()}"
            probe.touch(0o600)
            probe.unlink()
        except OSError as error:
            raise InvalidConfig(f"--responses-dir: {folder} cannot be used: {error.strerror}") from error

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep a response, replacing one of the same id; raise OSError where the disk does not take it."""
        path = self._path(owner, stored.response["id"])
        if path is None or stored.num_bytes > self._max_bytes // 4:
            return
        written = msgspec.json.encode(stored)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(written)
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        self._num_bytes += len(written)
        self._until_look -= 1
        if self._until_look < 0 or self._num_bytes > self._max_bytes:
            self._make_room()

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the owner's response of this id, if it is kept and whole."""
        path = self._path(owner, response_id)
        if path is None:
            return None
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=StoredResponse)
            os.utime(path)
        except (OSError, msgspec.DecodeError):
            return None
        return stored

    def drop(self, owner: str, response_id: str) -> bool:
        """Forget the owner's response of this id; return False if it is not kept."""
        path = self._path(owner, response_id)
        if path is None:
            return False
        try:
            path.unlink()
        except OSError:
            return False
        return True

    def _path(self, owner: str, response_id: str) -> Path | None:
        """Return the file of a response; None: no response has such an id."""
        if not _ID.fullmatch(response_id) or (owner and not _OWNER.fullmatch(owner)):
            return None
        return self._folder / (owner or _OPEN) / f"{response_id}.json"

    def _make_room(self) -> None:
        """Count what is there, and if it is too much, delete the oldest of whoever holds most."""
        self._until_look = _LOOK_EVERY
        shelves: dict[Path, list[tuple[float, int, Path]]] = {}
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(OSError):  # another server deletes, too
                found = path.stat()
                shelves.setdefault(path.parent, []).append((found.st_mtime, found.st_size, path))
        sizes = {owner: sum(size for _, size, _ in shelf) for owner, shelf in shelves.items()}
        self._num_bytes = sum(sizes.values())
        if self._num_bytes <= self._max_bytes:
            return
        for shelf in shelves.values():
            shelf.sort(reverse=True)  # the oldest last
        while self._num_bytes > _ROOM * self._max_bytes:
            owner = max(sizes, key=sizes.__getitem__)
            _, size, path = shelves[owner].pop()
            with contextlib.suppress(OSError):
                path.unlink()
            sizes[owner] -= size
            self._num_bytes -= size
