"""The consumer's side of one connection: proves itself, asks for pages, and believes nothing before it is checked."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable

from tokenmill.engine.transfer.remote.channel import Channel, TransferError
from tokenmill.engine.transfer.remote.messages import (
    MOST_HANDLES,
    VERSION,
    Ask,
    Finished,
    Handle,
    Hello,
    PageFormat,
    Proof,
    Refused,
    Renew,
    ToConsumer,
    Welcome,
    offered,
)
from tokenmill.engine.transfer.remote.server import HANDSHAKE_SECONDS
from tokenmill.engine.transfer.remote.transports import Receiver, Store, StreamReceiver, WindowReceiver
from tokenmill.ipc.address import Address
from tokenmill.ipc.secret import NONCE_BYTES, Secret

MakeReceiver = Callable[[int, bytes, Channel[ToConsumer], float], Receiver]


def _stream_receiver(page_bytes: int, _offer: bytes, _channel: Channel[ToConsumer], _deadline: float) -> Receiver:
    return StreamReceiver(page_bytes)


# What makes the consumer's half of a transport of (page_bytes, the producer's offer, the channel, a deadline).
RECEIVERS: dict[str, MakeReceiver] = {"stream": _stream_receiver, "window": WindowReceiver}


class PageClient:
    """One connection to a producer. Used by one thread.

    Attributes:
        lease_seconds: how long the producer holds pages without a renewal.
    """

    def __init__(
        self, address: Address, secret: Secret, format: PageFormat, transport: str, make: MakeReceiver | None = None
    ) -> None:
        """Connect, and let both sides prove that they know the secret.

        Args:
            format: of our own pages.
            transport: how pages are to travel; at its end `OF_WINDOWS` or `OF_STATES`: they are of that kind.
            make: makes our half of the transport; None: see `RECEIVERS`.

        Raises:
            TransferError: no producer listens, it does not know the secret, or its pages are not like ours.
        """
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        try:
            connection = address.connect(HANDSHAKE_SECONDS)
        except OSError as error:
            raise TransferError(f"no producer answers at {address}: {error.strerror or error}") from error
        self._channel = Channel[ToConsumer](connection, ToConsumer)
        try:
            welcome = self._introduce(secret, transport, deadline)
            difference = format.difference(welcome.format)
            if difference:
                raise TransferError(difference)
            self.lease_seconds = max(1.0, min(3600.0, welcome.lease_seconds))
            make = make or RECEIVERS[transport.partition("/")[0]]
            self._receiver = make(format.page_bytes, welcome.offer, self._channel, deadline)
        except BaseException:
            self._channel.close()
            raise

    def _introduce(self, secret: Secret, transport: str, deadline: float) -> Welcome:
        hello = self._channel.receive(deadline)
        if not isinstance(hello, Hello) or hello.version != VERSION:
            raise TransferError(f"the server there does not speak version {VERSION} of this protocol")
        ours = secrets.token_bytes(NONCE_BYTES)
        proof = secret.prove("consumer", hello.nonce, ours, transport.encode())
        self._channel.send(Proof(ours, transport, proof), deadline)
        welcome = self._channel.receive(deadline)
        if isinstance(welcome, Refused):
            raise TransferError(f"the producer refuses: {welcome.reason}")
        if not isinstance(welcome, Welcome):
            raise TransferError("the producer did not answer a proof with its own")
        if not secret.is_proof(welcome.proof, "producer", hello.nonce, ours, offered(welcome)):
            raise TransferError("the producer does not know the secret")
        return welcome

    def fetch(self, ask: Ask, store: Store, deadline: float) -> None:
        """Give the pages that `ask` names to `store`, in order.

        Raises:
            PagesRefused: the producer does not give them, and says why.
            TransferError: the pages do not come; the connection must be closed then.
        """
        self._channel.send(ask, deadline)
        self._receiver.receive(self._channel, ask.count, store, deadline)

    def renew(self, handles: Iterable[Handle], deadline: float) -> None:
        """Tell the producer to hold these pages longer, as requests wait for them.

        Raises:
            TransferError: the producer is gone.
        """
        handles = list(handles)
        for start in range(0, len(handles), MOST_HANDLES):
            self._channel.send(Renew(handles[start : start + MOST_HANDLES]), deadline)

    def release_pages(self, handle: Handle, deadline: float) -> None:
        """Tell the producer that these pages are not wanted here any more.

        Raises:
            TransferError: the producer is gone.
        """
        self._channel.send(Finished(handle), deadline)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()
        self._receiver.close()
