"""Move pages through the connection, or through slots of memory that the consumer can read: two transports.

    stream    page memory ──copy──> buffer ──send──> socket ──receive──> buffer ──copy──> page memory    any host
    window    page memory ──copy──> slot of a memfd, mapped by both ──copy──> page memory                one host

The copies at both ends make the checksums in the same pass, and nothing else touches a page: pages can be taken back
from a transfer between two chunks. Buffers are small enough to stay in the processor's cache as they go round, so
that each byte is read from memory once and written to memory once, as by a plain copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from tokenmill.engine.transfer.remote.channel import Channel, PagesRefused, TransferError
from tokenmill.engine.transfer.remote.messages import MOST_CHUNK_PAGES, Chunk, Refused, SlotFree, ToConsumer, ToProducer

# Bytes that go at a time, so that one side works on some while the other works on those before.
CHUNK_BYTES = 1 << 20
NUM_SLOTS = 4
# The kernel must promise that a window never shrinks: a reader would die of it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

CopyOut = Callable[[int, int, memoryview], list[int]]
"""(first page of those that were asked for, how many, where to) -> their checksums."""

Store = Callable[[int, memoryview, list[int]], None]
"""(first page of those that were asked for, pages that have come, their checksums). Raises TransferError."""


class Sender(Protocol):
    """The producer's half of a transport, for one connection.

    Attributes:
        offer: bytes that the consumer's half is made from.
    """

    offer: bytes

    def welcomed(self, channel: Channel[ToProducer]) -> None:
        """Send what belongs to the offer but is no bytes, once the offer has been sent."""
        ...

    def send(self, channel: Channel[ToProducer], count: int, copy_out: CopyOut, deadline: float) -> None:
        """Send `count` pages, in order.

        Raises:
            TransferError: the consumer does not take them.
        """
        ...

    def close(self) -> None:
        """Let go of what the transport holds."""
        ...


class Receiver(Protocol):
    """The consumer's half of a transport, for one connection."""

    def receive(self, channel: Channel[ToConsumer], count: int, store: Store, deadline: float) -> None:
        """Give the next `count` pages to `store`, in order.

        Raises:
            TransferError: they do not come, or one is damaged.
        """
        ...

    def close(self) -> None:
        """Let go of what the transport holds."""
        ...


def pages_of_a_chunk(page_bytes: int) -> int:
    """Return the number of pages in about `CHUNK_BYTES`."""
    return min(MOST_CHUNK_PAGES, max(1, CHUNK_BYTES // page_bytes))


def _chunks(count: int, page_bytes: int) -> Iterator[tuple[int, int]]:
    step = pages_of_a_chunk(page_bytes)
    return ((first, min(step, count - first)) for first in range(0, count, step))


def _next_chunk(channel: Channel[ToConsumer], most: int, deadline: float) -> Chunk:
    """Return the head of the next pages, of which there are at most `most`."""
    message = channel.receive(deadline)
    if isinstance(message, Refused):
        raise PagesRefused(f"the producer refuses: {message.reason}")
    if not isinstance(message, Chunk) or not 0 < len(message.checksums) <= most:
        raise TransferError("the producer sent something other than the pages that are due")
    return message


class StreamSender:
    """Sends pages behind their checksums."""

    offer = b""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._buffer = memoryview(bytearray(pages_of_a_chunk(page_bytes) * page_bytes))

    def welcomed(self, channel: Channel[ToProducer]) -> None:
        """Do nothing: the offer is empty."""

    def send(self, channel: Channel[ToProducer], count: int, copy_out: CopyOut, deadline: float) -> None:
        """Send pages, chunk by chunk, each behind its checksums."""
        for first, some in _chunks(count, self._page_bytes):
            data = self._buffer[: some * self._page_bytes]
            channel.send(Chunk(copy_out(first, some, data)), deadline, [data])

    def close(self) -> None:
        """Do nothing: it holds only memory."""


class StreamReceiver:
    """Receives pages, chunk by chunk."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes
        self._buffer = memoryview(bytearray(pages_of_a_chunk(page_bytes) * page_bytes))

    def receive(self, channel: Channel[ToConsumer], count: int, store: Store, deadline: float) -> None:
        """Receive chunks into this side's buffer, and give them to `store`."""
        done, most = 0, len(self._buffer) // self._page_bytes
        while done < count:
            chunk = _next_chunk(channel, min(most, count - done), deadline)
            data = self._buffer[: len(chunk.checksums) * self._page_bytes]
            channel.receive_into([data], deadline)
            store(done, data, chunk.checksums)
            done += len(chunk.checksums)

    def close(self) -> None:
        """Do nothing: it holds only memory."""


class Slots(msgspec.Struct, frozen=True):
    """The shape of the memory that pages come through: slots of a number of pages each."""

    num_slots: int
    slot_pages: int

    def num_bytes(self, page_bytes: int) -> int:
        """Return the bytes of all slots."""
        return self.num_slots * self.slot_pages * page_bytes

    def slot(self, buffer: memoryview, number: int, num_pages: int, page_bytes: int) -> memoryview:
        """Return the first pages of a slot."""
        start = number * self.slot_pages * page_bytes
        return buffer[start : start + num_pages * page_bytes]


class SlotSender:
    """Copies pages into free slots and names them to the consumer. A subclass lets the consumer read them."""

    def __init__(self, buffer: memoryview, slots: Slots, page_bytes: int) -> None:
        self._buffer = buffer
        self._slots = slots
        self._page_bytes = page_bytes
        self._free = list(range(slots.num_slots))

    def send(self, channel: Channel[ToProducer], count: int, copy_out: CopyOut, deadline: float) -> None:
        """Copy pages into free slots, chunk by chunk. When it returns all slots are free again."""
        for first, some in _chunks(count, self._page_bytes):
            if not self._free:
                self._take_back(channel, deadline)
            number = self._free.pop(0)
            with self._slots.slot(self._buffer, number, some, self._page_bytes) as data:
                checksums = copy_out(first, some, data)
            channel.send(Chunk(checksums, number), deadline)
        while len(self._free) < self._slots.num_slots:
            self._take_back(channel, deadline)

    def _take_back(self, channel: Channel[ToProducer], deadline: float) -> None:
        message = channel.receive(deadline)
        if not isinstance(message, SlotFree) or message.slot in self._free or message.slot >= self._slots.num_slots:
            raise TransferError("the consumer gave back a slot that it does not have")
        self._free.append(message.slot)


class SlotReceiver(ABC):
    """Passes on the pages from slots that the producer has filled."""

    def __init__(self, slots: Slots, page_bytes: int) -> None:
        self._slots = slots
        self._page_bytes = page_bytes

    @abstractmethod
    def read_slot(self, number: int, num_pages: int, deadline: float) -> memoryview:
        """Return the first pages of a slot, valid until the next call."""

    def receive(self, channel: Channel[ToConsumer], count: int, store: Store, deadline: float) -> None:
        """Give the pages of each filled slot to `store`, then give the slot back."""
        done = 0
        while done < count:
            chunk = _next_chunk(channel, min(count - done, self._slots.slot_pages), deadline)
            if chunk.slot >= self._slots.num_slots:
                raise TransferError(f"the producer filled slot {chunk.slot}, which does not exist")
            with self.read_slot(chunk.slot, len(chunk.checksums), deadline) as data:
                store(done, data, chunk.checksums)
            channel.send(SlotFree(chunk.slot), deadline)
            done += len(chunk.checksums)


def slots_offered(offer: bytes, page_bytes: int) -> Slots:
    """Return the slots that a producer offers.

    Raises:
        TransferError: it offers none, or too many.
    """
    try:
        slots = msgspec.msgpack.decode(offer, type=Slots)
    except msgspec.MsgspecError as error:
        raise TransferError(f"the producer offers no slots: {error}") from error
    return check_slots(slots, page_bytes)


def check_slots(slots: Slots, page_bytes: int) -> Slots:
    """Return the same slots if they are within bounds.

    Raises:
        TransferError: they are empty, or more than any producer of ours has.
    """
    if not (0 < slots.num_slots <= NUM_SLOTS and 0 < slots.slot_pages <= pages_of_a_chunk(page_bytes)):
        raise TransferError(f"the producer offers {slots.num_slots} slots of {slots.slot_pages} pages")
    return slots


class WindowSender(SlotSender):
    """Puts pages in slots of a memfd, whose descriptor the consumer is given."""

    def __init__(self, page_bytes: int, num_slots: int = NUM_SLOTS) -> None:
        """Raises OSError if the system has no such memory."""
        slots = Slots(num_slots, pages_of_a_chunk(page_bytes))
        self.offer = msgspec.msgpack.encode(slots)
        self._descriptor = os.memfd_create("tokenmill-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._descriptor, slots.num_bytes(page_bytes))
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._descriptor, slots.num_bytes(page_bytes))
        except OSError:
            os.close(self._descriptor)
            raise
        super().__init__(memoryview(self._map), slots, page_bytes)

    def welcomed(self, channel: Channel[ToProducer]) -> None:
        """Send the descriptor of the window."""
        socket.send_fds(channel.socket, [b"\0"], [self._descriptor])

    def close(self) -> None:
        """Unmap and close the window."""
        self._buffer.release()
        self._map.close()
        os.close(self._descriptor)


class WindowReceiver(SlotReceiver):
    """Maps the producer's window, to read only."""

    def __init__(self, page_bytes: int, offer: bytes, channel: Channel[ToConsumer], deadline: float) -> None:
        """Raises TransferError if the producer gives no window that is safe to map."""
        super().__init__(slots_offered(offer, page_bytes), page_bytes)
        size = self._slots.num_bytes(page_bytes)
        descriptor = _received_descriptor(channel, deadline)
        try:
            is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not is_sealed or os.fstat(descriptor).st_size != size:
                raise TransferError("the producer's window has another size than it says, or may shrink")
            self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        except OSError as error:
            raise TransferError(f"the producer's window cannot be mapped: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def read_slot(self, number: int, num_pages: int, deadline: float) -> memoryview:
        """Return the first pages of a slot in the window."""
        with memoryview(self._map) as buffer:
            return self._slots.slot(buffer, number, num_pages, self._page_bytes)

    def close(self) -> None:
        """Unmap the window."""
        self._map.close()


def _received_descriptor(channel: Channel[ToConsumer], deadline: float) -> int:
    channel.socket.settimeout(max(0.001, deadline - time.monotonic()))
    try:
        _, descriptors, _, _ = socket.recv_fds(channel.socket, 1, 1)
    except OSError as error:
        raise TransferError(f"no window came: {error}") from error
    if len(descriptors) != 1:
        raise TransferError("no window came")
    return descriptors[0]
