"""The bytes of a session file: a conversation's tokens with their KV, for another start or another machine.

    |page|page|..|state|..|window page|..|header, one line of JSON|records of pages|of states|of window pages|tail|

All lie in slots, as in the files of a store (`SlotFormat`), so that they are read like those. The tail, of a fixed
size, says where the header is, and has a digest of all before it (BLAKE2b, 128 bits). The digest finds damage; it is no
signature: who restores a file trusts its writer.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import CacheKey
from tokenmill.core.whole_file import whole_file
from tokenmill.engine.transfer.slot_format import SlotFormat, open_own, read_from
from tokenmill.engine.transfer.slots import NeighbourSlot, Slot

VERSION = 1
_TAIL = struct.Struct("<8sQ16s")
_MAGIC = b"TMsessn\x01"
_READ_BYTES = 1 << 22


class SessionHeader(msgspec.Struct, frozen=True):
    """The description of a session file's content.

    Attributes:
        name: of the pages' kind: the model, its formats, what rounds; see `SlotFormat.name`.
        page_bytes, state_bytes, window_bytes: of a page, of a recurrent state and of a page of the window group; 0: the
            model has none.
        model, salt, adapter: whose KV it is; see `CacheKey`.
        tokens: of the conversation; the pages are those of the first of them.
    """

    version: int
    name: str
    page_bytes: int
    state_bytes: int
    page_size: int
    num_pages: int
    num_states: int
    model: str
    salt: str
    adapter: str
    tokens: list[int]
    window_bytes: int = 0
    num_windows: int = 0


class Content(msgspec.Struct, frozen=True):
    """One page or state to be written: its key and tokens, see `page_keys`, and what copies it to a buffer.

    `read` returns False if it is not there any more.
    """

    key: bytes
    tokens: bytes
    read: Callable[[memoryview], bool]


class SavedSession(msgspec.Struct, frozen=True):
    """A session file that was checked.

    Attributes:
        pages, states, windows: where they are. num_bytes: of the file.
    """

    cache_key: CacheKey
    tokens: list[int]
    pages: list[NeighbourSlot]
    states: list[NeighbourSlot]
    windows: list[NeighbourSlot]
    num_bytes: int


class SessionForm:
    """Writes and reads session files of one kind of pages.

    Args:
        pages: their form in files. states: that of recurrent states; None: the model has none.
        windows: that of pages of the window group; None: there is no such group.
        page_size: tokens of a page.
    """

    def __init__(
        self, pages: SlotFormat, states: SlotFormat | None, page_size: int, windows: SlotFormat | None = None
    ) -> None:
        self.pages, self.states, self.windows, self._page_size = pages, states, windows, page_size
        self._forms = pages, states, windows

    def write(self, path: Path, key: CacheKey, tokens: list[int], contents: Sequence[Sequence[Content]]) -> int:
        """Write a session file, which appears as a whole or not at all; return its bytes.

        Args:
            contents: the pages, the states and the pages of the window group.

        Raises:
            OSError: the disk is full or broken.
            InvalidRequest: the engine has taken the pages back.
        """
        with whole_file(path, 0o600) as file:
            digest, position = blake2b(digest_size=16), 0

            def put(data: bytes | memoryview) -> None:
                nonlocal position
                file.write(data)
                digest.update(data)
                position += len(data)

            records = bytearray()
            for form, some in zip(self._forms, contents, strict=True):
                if form is None:
                    continue
                put(bytes(-position % form.slot_bytes))
                buffer = memoryview(bytearray(form.slot_bytes))
                page = buffer[: form.page_bytes]
                for content in some:
                    if not content.read(page):
                        raise InvalidRequest("the KV was given up while it was saved: save the session again")
                    slot = Slot(position // form.slot_bytes, content.key, content.tokens, form.checksum(page))
                    put(buffer)
                    records += form.encode(slot)
            start = position
            put(msgspec.json.encode(self._header(key, tokens, [len(some) for some in contents])) + b"\n" + records)
            file.write(_TAIL.pack(_MAGIC, start, digest.digest()))
        return position + _TAIL.size

    def _header(self, key: CacheKey, tokens: list[int], counts: Sequence[int]) -> SessionHeader:
        page, state, window = (0 if form is None else form.page_bytes for form in self._forms)
        num_pages, num_states, num_windows = counts
        numbers = self._page_size, num_pages, num_states
        return SessionHeader(VERSION, self.pages.name, page, state, *numbers, *key, tokens, window, num_windows)

    def read(self, path: Path) -> SavedSession:
        """Check all of a session file, and return where its pages are.

        Raises:
            InvalidRequest: it cannot be read, is damaged, or is of another model or format: what to do, in a sentence.
        """
        try:
            number = open_own(path, os.O_RDONLY)
        except OSError as error:
            raise InvalidRequest(f"{path.name} cannot be read: {error.strerror or error}", "filename") from error
        try:
            start, size = _check(number, path.name)
            line, _, records = read_from(number, start)[: size - start - _TAIL.size].partition(b"\n")
        finally:
            os.close(number)
        try:
            header = msgspec.json.decode(line, type=SessionHeader)
        except msgspec.DecodeError as error:
            raise InvalidRequest(f"{path.name} is a session file of another version: {error}", "filename") from error
        self._check_kind(header, path.name)
        return self._session(header, path, records, size)

    def _session(self, header: SessionHeader, path: Path, records: bytes, size: int) -> SavedSession:
        start, found = 0, list[list[NeighbourSlot]]()
        for form, count in zip(self._forms, (header.num_pages, header.num_states, header.num_windows), strict=True):
            end = start + (0 if form is None else count * form.record_bytes)
            found.append([] if form is None else list(_slots(form, records[start:end], path)))
            start = end
        key = CacheKey(header.model, header.salt, header.adapter)
        pages, states, windows = found
        return SavedSession(key, header.tokens, pages, states, windows, size)

    def _check_kind(self, header: SessionHeader, file: str) -> None:
        """Raise InvalidRequest, which says what differs, if the file's pages mean nothing here."""
        own = self._header(CacheKey(), [], (0, 0, 0))
        if header.version != VERSION:
            raise InvalidRequest(f"{file} has version {header.version} of session files, not {VERSION}", "filename")
        shapes = [(one.page_size, one.page_bytes, one.state_bytes, one.window_bytes) for one in (header, own)]
        if shapes[0] != shapes[1]:
            text = f"{file} has KV of another shape: serve the model with which it was saved, in the same formats"
        elif header.name != own.name:
            text = f"{file} was saved with another model, or other formats or kernels, so its KV means nothing here"
        else:
            return
        raise InvalidRequest(text, "filename")


def _check(number: int, file: str) -> tuple[int, int]:
    """Compare the digest of a file; return where its header begins, and its size."""
    size = os.fstat(number).st_size
    tail = os.pread(number, _TAIL.size, max(0, size - _TAIL.size))
    if len(tail) < _TAIL.size or not tail.startswith(_MAGIC):
        raise InvalidRequest(f"{file} is no session file, or its end is missing: copy it again", "filename")
    _, start, wanted = _TAIL.unpack(tail)
    digest, position, end = blake2b(digest_size=16), 0, size - _TAIL.size
    while position < end:
        data = os.pread(number, min(_READ_BYTES, end - position), position)
        digest.update(data)
        position += len(data) or end
    if digest.digest() != wanted or start > end:
        raise InvalidRequest(f"{file} is damaged, its digest is wrong: copy it again, or save it anew", "filename")
    return start, size


def _slots(form: SlotFormat, records: bytes, path: Path) -> Iterator[NeighbourSlot]:
    for slot in form.decode(records):
        yield NeighbourSlot(slot.number, slot.key, slot.tokens, slot.checksum, path)
