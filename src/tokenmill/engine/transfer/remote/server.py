"""The producer's side: gives pages that are on lease to consumers that know the secret and the handle.

One thread listens, one serves each connection. Before the secret is proved a connection may send one message, within a
few seconds; afterwards only what `ToProducer` lists, each with a deadline. A fault of a connection ends that one alone.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.transfer.remote.channel import Channel, TransferError
from tokenmill.engine.transfer.remote.leases import Lease, LeaseRefused, LeaseTable
from tokenmill.engine.transfer.remote.messages import (
    VERSION,
    Ask,
    Finished,
    Hello,
    PageFormat,
    Proof,
    Refused,
    Renew,
    ToProducer,
    Welcome,
    offered,
)
from tokenmill.engine.transfer.remote.transports import CopyOut, Sender
from tokenmill.ipc.address import Address
from tokenmill.ipc.secret import NONCE_BYTES, Secret

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
HANDSHAKE_SECONDS = 5.0
# How long the end waits for a thread, which has nothing left to wait for itself.
CLOSE_SECONDS = 2.0
# A consumer with nothing to say or renew closes its connection long before.
IDLE_SECONDS = 300.0
# For the pages of one `Ask` to be taken.
ASK_SECONDS = 30.0


class Producer(msgspec.Struct, frozen=True):
    """The engine that a server serves pages of.

    Attributes:
        copy_out: copies pages, one after another, and returns their checksums.
        senders: the transports it offers, by name; each call makes the sender of one connection.
        kind: of its pages; "", `OF_WINDOWS` or `OF_STATES`.
    """

    engine_id: str
    format: PageFormat
    secret: Secret
    leases: LeaseTable
    copy_out: Callable[[Sequence[int], memoryview], list[int]]
    senders: Mapping[str, Callable[[], Sender]]
    kind: str = ""

    def copier(self, lease: Lease, start: int) -> CopyOut:
        """Return a function that copies pages of a lease, counted from page `start`, and renews the lease each time."""

        def copy(first: int, count: int, data: memoryview) -> list[int]:
            self.leases.renew([lease.handle])
            return lease.read(start + first, count, lambda pages: self.copy_out(pages, data), self.kind)

        return copy


class PageServer:
    """Serves a producer's pages from `start` to `close`."""

    def __init__(self, address: Address, producer: Producer, others: Sequence[Producer] = ()) -> None:
        """Bind the address.

        Args:
            others: the same engine with pages of other kinds.

        Raises:
            InvalidConfig: the address cannot be bound.
        """
        self._producer = producer
        # By the name of the transport, which a connection begins with.
        self._producers = {name: one for one in (producer, *others) for name in one.senders}
        try:
            self._listener = address.listen()
        except OSError as error:
            raise InvalidConfig(f"pages cannot be served at {address}: {error.strerror or error}") from error
        # A port of 0 was chosen by the system.
        self.address = address if address.is_unix else Address(address.host, self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._channels: dict[Channel[ToProducer], threading.Thread] = {}
        self._listening = threading.Thread(target=self._listen, name="page-server", daemon=True)
        self._is_closed = False

    def start(self) -> None:
        """Accept connections from now on."""
        self._listening.start()

    def close(self) -> None:
        """Stop listening and end all connections."""
        with self._lock:
            self._is_closed = True
            channels = dict(self._channels)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self.address.is_unix:
            self.address.unlink()
        for channel in channels:
            channel.close()
        for thread in (self._listening, *channels.values()):
            thread.join(CLOSE_SECONDS)

    def _listen(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    logger.warning("a connection to the page server failed: %s", error)
                    time.sleep(0.1)  # without descriptors, say: they come back as others end
                continue
            channel = Channel[ToProducer](connection, ToProducer)
            thread = threading.Thread(target=self._serve, args=(channel,), name="page-connection", daemon=True)
            with self._lock:
                is_welcome = not self._is_closed and len(self._channels) < MOST_CONNECTIONS
                if is_welcome:
                    self._channels[channel] = thread
                    thread.start()
            if not is_welcome:
                channel.close()

    def _serve(self, channel: Channel[ToProducer]) -> None:
        sender = None
        try:
            producer, sender = self._welcome(channel)
            while True:
                _answer(producer, channel, sender, channel.receive(time.monotonic() + IDLE_SECONDS))
        except TransferError as error:
            logger.info("a connection to the page server ends: %s", error)
        except Exception:  # of this connection alone: the others go on, and the log says what is wrong
            logger.exception("a connection to the page server ends")
        finally:
            with self._lock:
                self._channels.pop(channel, None)
            channel.close()
            if sender is not None:
                sender.close()

    def _welcome(self, channel: Channel[ToProducer]) -> tuple[Producer, Sender]:
        """Let both sides prove that they know the secret; return whose pages the connection gets, and their sender.

        Raises:
            TransferError: the other side does not know the secret, or wants what is not offered.
        """
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        ours = secrets.token_bytes(NONCE_BYTES)
        channel.send(Hello(VERSION, ours), deadline)
        proof = channel.receive(deadline)
        if not isinstance(proof, Proof):
            raise TransferError("it did not begin with a proof")
        if not self._producer.secret.is_proof(proof.proof, "consumer", ours, proof.nonce, proof.plane.encode()):
            raise TransferError("it does not know the secret")
        producer = self._producers.get(proof.plane)
        if producer is None:
            channel.send(Refused(f"pages do not travel by {proof.plane[:20]!r} here"), deadline)
            raise TransferError(f"it wants pages by {proof.plane!r}")
        sender = producer.senders[proof.plane]()
        try:
            welcome = Welcome(producer.engine_id, producer.format, producer.leases.seconds, sender.offer, b"")
            own_proof = producer.secret.prove("producer", ours, proof.nonce, offered(welcome))
            channel.send(msgspec.structs.replace(welcome, proof=own_proof), deadline)
            sender.welcomed(channel)
        except BaseException:
            sender.close()
            raise
        return producer, sender


def _answer(producer: Producer, channel: Channel[ToProducer], sender: Sender, message: ToProducer) -> None:
    leases = producer.leases
    match message:
        case Renew(handles):
            leases.renew(handles)
        case Finished(handle):
            leases.end_lease(handle)
        case Ask(handle, prefix, first, count):
            deadline = time.monotonic() + ASK_SECONDS
            try:
                lease = leases.find(handle)
                lease.check(prefix, first, count, producer.kind)
                sender.send(channel, count, producer.copier(lease, first), deadline)
            except LeaseRefused as refusal:
                channel.send(Refused(str(refusal)), deadline)
        case _:
            raise TransferError("it sent a message out of order")
