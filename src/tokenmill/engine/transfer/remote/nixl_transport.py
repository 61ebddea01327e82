"""Move pages by NIXL: the consumer reads the producer's slots, over whatever UCX finds between two hosts.

Leases, the secret, questions and checksums are those of all transports; only the slots' bytes travel otherwise. A
producer registers its slots and nothing else, so that is all that a consumer can read. UCX decides which wire is used,
e.g. by the variable UCX_TLS.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import threading
import time
from typing import Any

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.transfer.remote.channel import Channel, TransferError
from tokenmill.engine.transfer.remote.messages import ToConsumer, ToProducer
from tokenmill.engine.transfer.remote.transports import (
    NUM_SLOTS,
    SlotReceiver,
    Slots,
    SlotSender,
    check_slots,
    pages_of_a_chunk,
)

# The package itself, and the parts that it is made of, either of which has all that a CPU needs.
_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
_ALIGNMENT = 4096


class NixlAgent:
    """The NIXL agent of this process, for several threads.

    Raises:
        InvalidConfig: NIXL is not installed, or cannot start UCX.
    """

    def __init__(self) -> None:
        api = _load()
        try:
            self._agent = api.nixl_agent(f"tokenmill-{secrets.token_hex(8)}", api.nixl_agent_config(backends=["UCX"]))
        except Exception as error:  # it raises errors of its own, without a common base
            raise InvalidConfig(f"NIXL cannot start UCX: {error}") from error
        self._lock = threading.Lock()

    def register(self, num_bytes: int) -> Buffer:
        """Return memory that other agents may read."""
        memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        memory = memory[start : start + num_bytes]
        with self._lock:
            registered = self._agent.register_memory([(memory.ctypes.data, num_bytes, 0, "")], mem_type="DRAM")
        return Buffer(memory, registered)

    def deregister(self, buffer: Buffer) -> None:
        """Deregister a buffer, whose memory is not read any more."""
        with self._lock, contextlib.suppress(Exception):  # the other side may have died in the middle
            self._agent.deregister_memory(buffer.registered)

    def metadata(self) -> bytes:
        """Return the bytes that another agent needs in order to read what is registered here."""
        with self._lock:
            found: bytes = self._agent.get_agent_metadata()
            return found

    def add(self, metadata: bytes) -> str:
        """Learn of another agent and return its name.

        Raises:
            TransferError: NIXL refuses it, e.g. an agent of another version.
        """
        try:
            with self._lock:
                name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransferError(f"the producer's NIXL agent is refused: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        """Forget another agent."""
        with self._lock, contextlib.suppress(Exception):  # it may be dead
            self._agent.remove_remote_agent(name)

    def read(self, name: str, theirs: int, buffer: Buffer, num_bytes: int, deadline: float) -> None:
        """Read from an address that an agent has registered into the beginning of a buffer.

        Raises:
            TransferError: the read fails, or takes too long.
        """
        try:
            with self._lock:
                ours = self._agent.get_xfer_descs([(buffer.memory.ctypes.data, num_bytes, 0)], "DRAM")
                remote = self._agent.get_xfer_descs([(theirs, num_bytes, 0)], "DRAM")
                transfer = self._agent.initialize_xfer("READ", ours, remote, name)
                state = self._agent.transfer(transfer)
            try:
                while state == "PROC" and time.monotonic() < deadline:
                    time.sleep(20e-6)
                    with self._lock:
                        state = self._agent.check_xfer_state(transfer)
            finally:
                with self._lock:
                    self._agent.release_xfer_handle(transfer)
        except Exception as error:
            raise TransferError(f"NIXL cannot read: {error}") from error
        if state != "DONE":
            raise TransferError("NIXL did not go on in time" if state == "PROC" else f"NIXL cannot read: {state}")


class Buffer:
    """Registered memory."""

    def __init__(self, memory: np.ndarray[Any, np.dtype[np.uint8]], registered: Any) -> None:
        self.memory = memory
        self.registered = registered


class NixlOffer(msgspec.Struct, frozen=True):
    """The slots, their address, and the metadata of the agent that has registered them."""

    slots: Slots
    address: int
    metadata: bytes


class NixlSender(SlotSender):
    """Puts pages in slots that the consumer's agent reads."""

    def __init__(self, page_bytes: int, agent: NixlAgent, num_slots: int = NUM_SLOTS) -> None:
        slots = Slots(num_slots, pages_of_a_chunk(page_bytes))
        self._agent = agent
        self._registered = agent.register(slots.num_bytes(page_bytes))
        address = self._registered.memory.ctypes.data
        self.offer = msgspec.msgpack.encode(NixlOffer(slots, address, agent.metadata()))
        super().__init__(memoryview(self._registered.memory.data), slots, page_bytes)

    def welcomed(self, channel: Channel[ToProducer]) -> None:
        """Do nothing: the offer has all that the consumer needs."""

    def close(self) -> None:
        """Deregister the slots."""
        self._agent.deregister(self._registered)


class NixlReceiver(SlotReceiver):
    """Reads a slot into a buffer of its own."""

    def __init__(
        self, page_bytes: int, offer: bytes, _channel: Channel[ToConsumer], _deadline: float, agent: NixlAgent
    ) -> None:
        """Raises TransferError if the producer's slots cannot be read."""
        try:
            found = msgspec.msgpack.decode(offer, type=NixlOffer)
        except msgspec.MsgspecError as error:
            raise TransferError(f"the producer offers nothing to read: {error}") from error
        super().__init__(check_slots(found.slots, page_bytes), page_bytes)
        self._agent = agent
        self._address = found.address
        self._name = agent.add(found.metadata)
        self._buffer = agent.register(found.slots.slot_pages * page_bytes)

    def read_slot(self, number: int, num_pages: int, deadline: float) -> memoryview:
        """Read the first pages of a slot into this side's buffer, and return them."""
        start = self._address + number * self._slots.slot_pages * self._page_bytes
        size = num_pages * self._page_bytes
        self._agent.read(self._name, start, self._buffer, size, deadline)
        return memoryview(self._buffer.memory.data)[:size]

    def close(self) -> None:
        """Forget the producer's agent and deregister the buffer."""
        self._agent.remove(self._name)
        self._agent.deregister(self._buffer)


def _load() -> Any:
    for name in _MODULES:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise InvalidConfig("the NixlConnector needs NIXL: pip install 'tokenmill[nixl]'")
