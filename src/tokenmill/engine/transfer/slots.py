"""`SlotStore`: where a tier has its pages, in slots of a fixed size; and the one in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenmill.engine.transfer.checksum import find_checksum


@dataclass(frozen=True, slots=True)
class Slot:
    """What is in a slot.

    Attributes:
        key: of the page, 16 bytes.
        tokens: of the page, int32, as bytes.
        checksum: of the page's bytes.
    """

    number: int
    key: bytes
    tokens: bytes
    checksum: int


class SlotStore(Protocol):
    """Pages in slots. One thread at a time calls it.

    Attributes:
        page_bytes: of a page.
        num_slots: as many pages fit.
    """

    page_bytes: int
    num_slots: int

    def checksum(self, data: memoryview, /) -> int:
        """What `read` compares."""

    def slots(self) -> Iterator[Slot]:
        """What is there already, least recently used first."""

    def rewrite(self, slots: Iterable[Slot]) -> None:
        """Note these and no others, in this order. Raises OSError where the disk is full or broken."""

    def append(self, slots: list[Slot]) -> None:
        """Note what is in some slots from now on. Raises OSError."""

    def write(self, number: int, data: memoryview) -> None:
        """Write a page to a slot. Raises OSError."""

    def read(self, slot: Slot, data: memoryview) -> bool:
        """Read a page; False: it is not what was written. Raises OSError."""

    def close(self) -> None:
        """Let go of files and memory."""


class SlotMemory:
    """Slots in the memory of the host: a `SlotStore` that ends with its process."""

    def __init__(self, page_bytes: int, limit: int) -> None:
        """`limit`: bytes that are taken at once."""
        self.page_bytes = page_bytes
        self.num_slots = limit // page_bytes
        _, self.checksum = find_checksum()
        self._pages: npt.NDArray[np.uint8] = np.zeros((self.num_slots, page_bytes), dtype=np.uint8)

    def slots(self) -> Iterator[Slot]:
        """See `SlotStore`: nothing is there at first."""
        return iter(())

    def rewrite(self, slots: Iterable[Slot]) -> None:
        """See `SlotStore`: nothing is noted."""

    def append(self, slots: list[Slot]) -> None:
        """See `SlotStore`: nothing is noted."""

    def write(self, number: int, data: memoryview) -> None:
        """See `SlotStore`."""
        self._pages[number] = np.frombuffer(data, dtype=np.uint8)

    def read(self, slot: Slot, data: memoryview) -> bool:
        """See `SlotStore`."""
        np.frombuffer(data, dtype=np.uint8)[:] = self._pages[slot.number]
        return self.checksum(data) == slot.checksum

    def close(self) -> None:
        """See `SlotStore`."""
        self._pages = self._pages[:0]
