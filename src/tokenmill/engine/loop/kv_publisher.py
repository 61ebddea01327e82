"""Publish KV events over ZeroMQ in the wire format of vLLM, so that its routers and subscribers work unchanged.

    PUB:    topic | sequence number (8 bytes, big-endian) | msgpack [time, [event, ...]]
    ROUTER: a subscriber that missed some asks with the first number it lacks and gets those still buffered,
            each as  "" | number | payload , ended by the number -1

An event is an array that begins with its tag: BlockStored, BlockRemoved or AllBlocksCleared. A page is a block there.
"""

from __future__ import annotations

import time
from collections import deque

import msgspec
import zmq

from tokenmill.config.fields import KVEventsConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.kv.events import CacheCleared, KVEvent, PagesRemoved, PagesStored

_END = (-1).to_bytes(8, "big", signed=True)
_NUMBER_BYTES = 8


class _Event(msgspec.Struct, array_like=True, tag=True):
    """Base of the events on the wire."""


class BlockStored(_Event):
    """Pages became matchable."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class BlockRemoved(_Event):
    """Pages were evicted."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event):
    """The cache was reset."""


class EventBatch(msgspec.Struct, array_like=True):
    """The events of one step."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class ReplicaEventBatch(EventBatch):
    """The events of one step of one engine among several; `data_parallel_rank` is its index."""

    data_parallel_rank: int


class KVPublisher:
    """One PUB socket and, if configured, one ROUTER socket for replays. Used from one thread.

    Raises:
        InvalidConfig: an endpoint cannot be bound.
    """

    def __init__(self, config: KVEventsConfig, engine: int | None = None) -> None:
        """Bind the sockets. `engine`: this engine's index, if there are several."""
        self._engine = engine
        self._topic = config.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pub = self._bind(zmq.PUB, config.endpoint, config.hwm)
        self._replay = None
        if config.replay_endpoint is not None:
            self._replay = self._bind(zmq.ROUTER, config.replay_endpoint, config.hwm)

    def publish(self, events: list[KVEvent]) -> None:
        """Send the events of a step as one batch; send nothing if there are none."""
        if not events:
            return
        batch = EventBatch(time.time(), [_on_the_wire(event) for event in events])
        if self._engine is not None:
            batch = ReplicaEventBatch(batch.ts, batch.events, self._engine)
        payload = self._encoder.encode(batch)
        number, self._next_number = self._next_number, self._next_number + 1
        self._buffer.append((number, payload))
        self._pub.send_multipart([self._topic, number.to_bytes(_NUMBER_BYTES, "big"), payload])

    def answer_replays(self) -> None:
        """Send missed events to the subscribers that asked for them; return at once if none did."""
        while self._replay is not None and self._replay.poll(0):
            client, *rest = self._replay.recv_multipart()
            if len(rest) != 2 or len(rest[1]) != _NUMBER_BYTES:
                continue  # not a request of this protocol; there is no form for an error either
            first = int.from_bytes(rest[1], "big")
            for number, payload in self._buffer:
                if number >= first:
                    self._replay.send_multipart([client, b"", number.to_bytes(_NUMBER_BYTES, "big"), payload])
            self._replay.send_multipart([client, b"", _END, b""])

    def close(self) -> None:
        """Close the sockets and drop unsent events."""
        self._context.destroy(linger=0)

    def _bind(self, kind: int, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidConfig(f"--kv-events-config: cannot bind {endpoint}: {error.strerror}") from error
        return socket


def _on_the_wire(event: KVEvent) -> BlockStored | BlockRemoved | AllBlocksCleared:
    match event:
        case PagesStored(hashes, parent_hash, token_ids, page_size):
            return BlockStored(hashes, parent_hash, token_ids, page_size, lora_id=None, medium="GPU")
        case PagesRemoved(hashes):
            return BlockRemoved(hashes, medium="GPU")
        case CacheCleared():
            return AllBlocksCleared()
