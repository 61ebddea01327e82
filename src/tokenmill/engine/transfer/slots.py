"""`SlotStore`: the interface of a tier's storage, in slots of a fixed size; `SlotMemory`: the one in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.engine.transfer.checksum import find_checksum


class Slot(msgspec.Struct, frozen=True):
    """The contents of a slot.

    Attributes:
        key: the page's key, 16 bytes.
        tokens: the page's tokens, int32, as bytes.
        checksum: that of the page's bytes.
    """

    number: int
    key: bytes
    tokens: bytes
    checksum: int

    def follows(self, before: Slot) -> bool:
        """Return True if it lies directly behind another slot, in the same file."""
        return self.number == before.number + 1 and type(before) is Slot


class NeighbourSlot(Slot, frozen=True):
    """A slot in the files of another engine."""

    pages: Path

    def follows(self, before: Slot) -> bool:
        """Return True if it lies directly behind another slot, in the same file."""
        is_next = self.number == before.number + 1
        return is_next and isinstance(before, NeighbourSlot) and self.pages == before.pages


class SlotStore(Protocol):
    """A store of pages in slots. One thread at a time calls it.

    Attributes:
        page_bytes: bytes of a page.
        num_slots: number of pages that fit.
    """

    page_bytes: int
    num_slots: int

    def checksum(self, data: memoryview, /) -> int:
        """Return the checksum of a page, with which it is compared when it was read."""

    def slots(self) -> Iterator[Slot]:
        """Yield the slots that are filled already, least recently used first."""

    def rewrite(self, slots: Iterable[Slot]) -> None:
        """Record these slots and no others, in this order. Raises OSError where the disk is full or broken."""

    def append(self, slots: list[Slot]) -> None:
        """Record the new contents of some slots. Raises OSError."""

    def write(self, number: int, data: memoryview) -> None:
        """Write a page to a slot. Raises OSError."""

    def expect(self, slots: Sequence[Slot]) -> None:
        """Begin to fetch the pages of slots that follow each other, which are read soon; do not wait for them."""

    def read_pages(self, slots: Sequence[Slot], data: memoryview) -> int:
        """Read the pages of slots that follow each other into `data`, one behind another. Raises OSError.

        Returns:
            How many are there, from the first on; they may be damaged.
        """

    def close(self) -> None:
        """Let go of files and memory."""


class SlotMemory:
    """A slot store in host memory, which ends with its process."""

    def __init__(self, page_bytes: int, limit: int) -> None:
        """`limit`: bytes to take, all at once."""
        self.page_bytes = page_bytes
        self.num_slots = limit // page_bytes
        _, self.checksum = find_checksum()
        self._pages: npt.NDArray[np.uint8] = np.zeros((self.num_slots, page_bytes), dtype=np.uint8)

    def slots(self) -> Iterator[Slot]:
        """Yield nothing: the memory is empty at first."""
        return iter(())

    def rewrite(self, slots: Iterable[Slot]) -> None:
        """Do nothing: there is no index."""

    def append(self, slots: list[Slot]) -> None:
        """Do nothing: there is no index."""

    def write(self, number: int, data: memoryview) -> None:
        """Copy a page into a slot."""
        self._pages[number] = np.frombuffer(data, dtype=np.uint8)

    def expect(self, slots: Sequence[Slot]) -> None:
        """Do nothing: they are there."""

    def read_pages(self, slots: Sequence[Slot], data: memoryview) -> int:
        """Copy pages from slots that follow each other."""
        pages = self._pages[slots[0].number : slots[0].number + len(slots)]
        np.frombuffer(data, dtype=np.uint8).reshape(pages.shape)[:] = pages
        return len(slots)

    def close(self) -> None:
        """Let go of the memory."""
        self._pages = self._pages[:0]
