"""Bytes per second of each transport of KV pages, beside a plain copy of the same bytes; the last line is JSON.

    python benchmarks/transfer.py [--pages 128] [--rounds 20]

Two processes: a producer with pages on lease, and this one, which fetches them into pages of its own. Pages are those
of Qwen3-0.6B in bfloat16: 28 layers of keys and values, 8 heads of 128, 16 tokens. A plain copy moves as many bytes
from one array of this process to another; bare TCP is as many bytes through a connection and nowhere else, by loops
that do nothing but send and receive: no transport over TCP is faster than that. All are measured in turn, round after
round; the best round of each counts.

On a machine that has other work, the clock says more of that than of a transport. So beside it stands what each side
takes of a processor: the slower side's share of a plain copy is what two free cores would bring at most.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokenmill.core.request import CacheKey
from tokenmill.engine.transfer.host_pages import HostPages
from tokenmill.engine.transfer.remote.client import PageClient
from tokenmill.engine.transfer.remote.leases import Lease, LeaseTable, prefix_digest
from tokenmill.engine.transfer.remote.messages import Ask, Handle, PageFormat
from tokenmill.engine.transfer.remote.server import PageServer, Producer
from tokenmill.engine.transfer.remote.transports import CHUNK_BYTES, StreamSender, WindowSender
from tokenmill.ipc.address import Address
from tokenmill.ipc.secret import Secret

LAYERS, PIECE, PAGE_SIZE = 28, 8 * 128 * 16, 16
KEY, SECRET, HANDLE = CacheKey("benchmark"), Secret(b"no secret at all, but long enough"), Handle("p", "r", "n")
WAYS = {
    "unix, memfd": ("unix:{}/a", "window"),
    "unix, socket": ("unix:{}/b", "stream"),
    "tcp": ("tcp://127.0.0.1:0", "stream"),
}


def tensors(num_pages: int) -> list[np.ndarray]:
    """Keys and values, every byte of which has been touched."""
    return [np.random.default_rng(0).integers(0, 1 << 16, (LAYERS, num_pages, PIECE), dtype=np.uint16) for _ in "kv"]


def format_of(memory: HostPages) -> PageFormat:
    """Return the format of both sides."""
    return PageFormat("benchmark", "HeadMajorKV", PAGE_SIZE, memory.page_bytes, checksum=memory.checksum)


def produce(num_pages: int, folder: str, pipe: Connection) -> None:
    """Serve pages at all addresses until the other side hangs up."""
    parts = tensors(num_pages)
    memory, leases = HostPages(parts), LeaseTable(600.0, 600.0)
    leases.grant(Lease(0, HANDLE, range(num_pages), KEY, np.arange(num_pages * PAGE_SIZE, dtype=np.int32)))
    format, size = format_of(memory), memory.page_bytes
    senders = {"stream": lambda: StreamSender(size), "window": lambda: WindowSender(size)}
    bare = socket.create_server(("127.0.0.1", 0))
    pipe.send(bare.getsockname())
    threading.Thread(target=send_bare, args=(bare, num_pages * size), daemon=True).start()
    for where, _ in WAYS.values():
        producer = Producer("p", format, SECRET, leases, memory.copy_out, senders)
        server = PageServer(Address.parse(where.format(folder)), producer)
        server.start()
        pipe.send(tuple(server.address))
    pipe.recv()


def send_bare(listener: socket.socket, num_bytes: int) -> None:
    """Answer each byte that comes with so many bytes."""
    connection, _ = listener.accept()
    room = memoryview(bytes(CHUNK_BYTES))
    while connection.recv(1):
        for start in range(0, num_bytes, CHUNK_BYTES):
            connection.sendall(room[: num_bytes - start])


class BareTcp:
    """As many bytes through a connection, in pieces as large as a transport's."""

    def __init__(self, address: tuple[str, int], num_bytes: int) -> None:
        self._connection = socket.create_connection(address, timeout=60)
        self._room = memoryview(bytearray(CHUNK_BYTES))
        self._num_bytes = num_bytes

    def run(self) -> None:
        """Once."""
        self._connection.sendall(b"?")
        left = self._num_bytes
        while left:
            left -= self._connection.recv_into(self._room[:left])


class Fetching:
    """A connection over which all pages are fetched again and again."""

    def __init__(self, address: Address, transport: str, num_pages: int, memory: HostPages) -> None:
        self._client = PageClient(address, SECRET, format_of(memory), transport)
        tokens = np.arange(num_pages * PAGE_SIZE, dtype=np.int32)
        self._ask = Ask(HANDLE, prefix_digest(KEY, tokens), 0, num_pages)
        self._memory = memory

    def run(self) -> None:
        """Once."""
        self._client.fetch(self._ask, self._store, time.monotonic() + 60.0)

    def _store(self, first: int, data: memoryview, checksums: list[int]) -> None:
        pages = range(first, first + len(checksums))
        assert self._memory.copy_in(pages, data) == checksums, "a page has changed"


class Took(NamedTuple):
    """Seconds of one round: by the clock, and of a processor, here and at the producer."""

    wall: float
    consumer: float
    producer: float


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def took(work: Callable[[], None], producer: int) -> Took:
    """Return the seconds of one run."""
    theirs, ours, start = cpu_seconds(producer), time.thread_time(), time.perf_counter()
    work()
    wall, consumer = time.perf_counter() - start, time.thread_time() - ours
    time.sleep(0.005)  # for the producer to come to rest
    return Took(wall, consumer, cpu_seconds(producer) - theirs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        producer = context.Process(target=produce, args=(given.pages, folder, theirs), daemon=True)
        producer.start()
        bare = ours.recv()
        addresses = [Address(*ours.recv()) for _ in WAYS]
        parts, sent = tensors(given.pages), tensors(given.pages)
        memory, num_bytes = HostPages(parts), sum(part.nbytes for part in parts)
        source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
        works: dict[str, Callable[[], None]] = {"plain copy": lambda: np.copyto(target, source)}
        works["bare tcp"] = BareTcp(bare, num_bytes).run
        for (name, (_, transport)), address in zip(WAYS.items(), addresses, strict=True):
            for part in parts:
                part.fill(0)
            works[name] = Fetching(address, transport, given.pages, memory).run
            works[name]()
            assert all(np.array_equal(a, b) for a, b in zip(parts, sent, strict=True)), "pages are not as they were"
        pid = producer.pid or 0
        rounds = [{name: took(work, pid) for name, work in works.items()} for _ in range(given.rounds)]
        ours.send(None)
        producer.join(10)
    gb = num_bytes / 1e9
    rates = {name: gb / min(one[name].wall for one in rounds) for name in works}
    sides = {
        name: [gb / max(1e-9, min(getattr(one[name], side) for one in rounds)) for side in ("consumer", "producer")]
        for name in works
    }
    sides["plain copy"][1] = sides["plain copy"][0]
    for name, rate in rates.items():
        consumer, producer_rate = sides[name]
        print(f"{name:14}{rate:6.2f} GB/s; {consumer:.2f} and {producer_rate:.2f} GB per second of a processor")
    result = {
        "bytes": num_bytes,
        "rounds": given.rounds,
        "GB/s": rounded(rates),
        "share of a copy": rounded({name: rate / rates["plain copy"] for name, rate in rates.items()}),
        "share of a copy by processor time": rounded(
            {name: min(both) / sides["plain copy"][0] for name, both in sides.items()}
        ),
    }
    print(json.dumps(result))


def rounded(figures: dict[str, float]) -> dict[str, float]:
    """With three digits behind the point."""
    return {name: round(figure, 3) for name, figure in figures.items()}


if __name__ == "__main__":
    main()
