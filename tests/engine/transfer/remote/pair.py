"""A producer's page server and what a consumer needs to ask it, in one process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tokenmill.core.request import CacheKey
from tokenmill.engine.transfer.host_pages import HostPages
from tokenmill.engine.transfer.remote.channel import TransferError
from tokenmill.engine.transfer.remote.client import PageClient
from tokenmill.engine.transfer.remote.leases import Lease, LeaseTable, prefix_digest
from tokenmill.engine.transfer.remote.messages import Ask, Handle, PageFormat
from tokenmill.engine.transfer.remote.server import PageServer, Producer
from tokenmill.engine.transfer.remote.transports import StreamSender, WindowSender
from tokenmill.ipc.address import Address
from tokenmill.ipc.secret import Secret

PAGE_SIZE = 16
SECRET = Secret(b"a secret of these tests only")
KEY = CacheKey("a model", "a salt")


def random_pages(rng: np.random.Generator, num_pages: int, layers: int = 3, piece: int = 160) -> list[np.ndarray]:
    """Two tensors [layers, pages, ...] of different types, as keys and values with scales might be."""
    return [
        rng.integers(0, 256, (layers, num_pages, piece), dtype=np.uint8),
        rng.random((layers, num_pages, 2, 5), dtype=np.float32),
    ]


def zero_pages(like: list[np.ndarray], num_pages: int) -> list[np.ndarray]:
    return [np.zeros((part.shape[0], num_pages, *part.shape[2:]), part.dtype) for part in like]


def same_pages(theirs: list[np.ndarray], pages: list[int], ours: list[np.ndarray], own: list[int]) -> bool:
    return all(np.array_equal(a[:, pages], b[:, own]) for a, b in zip(theirs, ours, strict=True))


@dataclass
class Pair:
    """A running producer with pages of its own."""

    server: PageServer
    leases: LeaseTable
    parts: list[np.ndarray]
    memory: HostPages
    format: PageFormat
    transport: str
    clients: list[PageClient] = field(default_factory=list)

    def connect(self, secret: Secret = SECRET, format: PageFormat | None = None) -> PageClient:
        client = PageClient(self.server.address, secret, format or self.format, self.transport)
        self.clients.append(client)
        return client

    def grant(self, handle: Handle, pages: list[int], tokens: np.ndarray, lease_id: int = 0) -> None:
        self.leases.grant(Lease(lease_id, handle, pages, KEY, tokens))

    def ask(self, handle: Handle, tokens: np.ndarray, first: int, count: int) -> Ask:
        return Ask(handle, prefix_digest(KEY, tokens[: (first + count) * PAGE_SIZE]), first, count)


def storing(memory: HostPages, own: list[int], taken: list[int] | None = None):
    """Return a function that stores pages in these of ours, and lists those that have come."""

    def store(first: int, data: memoryview, checksums: list[int]) -> None:
        pages = own[first : first + len(checksums)]
        for page, ours, theirs in zip(pages, memory.copy_in(pages, data), checksums, strict=True):
            if ours != theirs:
                raise TransferError(f"page {page} is not what it was")
            if taken is not None:
                taken.append(page)

    return store


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@contextlib.contextmanager
def running_pair(
    rng: np.random.Generator, transport: str, folder: Path, num_pages: int = 40, **leases
) -> Iterator[Pair]:
    parts = random_pages(rng, num_pages)
    memory = HostPages(parts)
    format = PageFormat("print", "Layout", PAGE_SIZE, memory.page_bytes, checksum=memory.checksum)
    table = LeaseTable(**{"seconds": 30.0, "most_seconds": 60.0} | leases)
    address = Address(f"unix:{folder}/pages.sock") if transport == "window" else Address("127.0.0.1")
    size = memory.page_bytes
    senders = {"stream": lambda: StreamSender(size), "window": lambda: WindowSender(size)}
    server = PageServer(address, Producer("engine-1", format, SECRET, table, memory.copy_out, senders))
    server.start()
    pair = Pair(server, table, parts, memory, format, transport)
    try:
        yield pair
    finally:
        server.close()
        for client in pair.clients:
            client.close()
