"""Messages between a consumer and a producer: msgspec structs in msgpack, each within bounds.

producer            consumer
Hello            ->
                 <- Proof
Welcome          ->                     from here on each knows that the other has the secret
                 <- Ask
Chunk, pages ... ->                     or Refused
                 <- SlotFree ...        where pages come through a window
                 <- Renew, Finished     whenever; no reply
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tokenmill.ipc.secret import NONCE_BYTES, PROOF_BYTES

VERSION = 1
# Bytes of one message; pages come behind it, not in it.
LARGEST_MESSAGE = 64 << 10
MOST_CHUNK_PAGES = 1024
MOST_HANDLES = 128
# End the name of a transport where a connection is for pages of the window group, or for recurrent states.
OF_WINDOWS = "/windows"
OF_STATES = "/states"

_Label = Annotated[str, Meta(max_length=128)]
_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_ProofBytes = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
_Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Count = Annotated[int, Meta(ge=0, le=1 << 31)]
_Checksums = Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(max_length=MOST_CHUNK_PAGES)]


class Handle(msgspec.Struct, array_like=True, frozen=True):
    """Name of a producer's pages in a request for them. It contains no address, and its nonce cannot be guessed."""

    engine_id: _Label
    request_id: _Label
    nonce: _Label


class PageFormat(msgspec.Struct, frozen=True):
    """Meaning of the bytes of a page. Pages go unchanged between equal formats, and not at all between different ones.

    Attributes:
        fingerprint: that of the model, its weights and their types; see `CacheKey`.
        layout: that of the KV cache.
        page_size: tokens of a page.
        page_bytes: bytes of a page over all layers.
        tp_size: number of ranks that share the heads; a page is that of all, side by side.
        pp_size: number of stages that share the layers.
        checksum: kind of the pages' checksum; see `HostPages`.
    """

    fingerprint: _Label
    layout: _Label
    page_size: _Count
    page_bytes: _Count
    tp_size: _Count = 1
    checksum: _Label = "crc32c"
    pp_size: _Count = 1

    def difference(self, other: PageFormat) -> str:
        """Return the first difference from `other`, the producer's format, as a sentence; empty if there is none."""
        words = {
            "page_size": "pages of {} tokens",
            "tp_size": "heads cut for {} ranks",
            "pp_size": "layers cut for {} stages",
            "layout": "the KV layout {}",
            "fingerprint": "the model and its types as {}",
            "page_bytes": "pages of {} bytes",
            "checksum": "checksums of the kind {}",
        }
        for name, word in words.items():
            theirs, ours = getattr(other, name), getattr(self, name)
            if theirs != ours:
                return f"the producer has {word.format(theirs)}, this engine {word.format(ours)}"
        return ""


class _Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages."""


class Hello(_Message):
    """Opens the connection: a producer speaks first."""

    version: _Count
    nonce: _Nonce


class Proof(_Message):
    """A consumer's answer to `Hello`. `plane`: the transport that it wants."""

    nonce: _Nonce
    plane: _Label
    proof: _ProofBytes


class Welcome(_Message):
    """The producer's proof, and what it offers.

    Attributes:
        lease_seconds: how often its leases must be renewed, at least.
        offer: data for the consumer's half of the transport, e.g. the size of a window.
    """

    engine_id: _Label
    format: PageFormat
    lease_seconds: float
    offer: Annotated[bytes, Meta(max_length=32 << 10)]
    proof: _ProofBytes


class Ask(_Message):
    """Asks for `count` pages from the `first` on, which hold the KV of exactly these tokens.

    Attributes:
        prefix: digest of the cache key and of all tokens up to the last of these pages; see `prefix_digest`.
    """

    handle: Handle
    prefix: _Digest
    first: _Count
    count: _Count


class Chunk(_Message):
    """Comes before pages, or says that they lie in a slot of the window. `checksums`: one a page, see `PageFormat`."""

    checksums: _Checksums
    slot: _Count = 0
    detail: Annotated[bytes, Meta(max_length=32 << 10)] = b""


class Refused(_Message):
    """Comes instead of pages, with the reason."""

    reason: Annotated[str, Meta(max_length=512)]


class SlotFree(_Message):
    """Says that the pages of a slot have been taken."""

    slot: _Count


class Renew(_Message):
    """Asks the producer to hold pages longer, as requests wait for them."""

    handles: Annotated[list[Handle], Meta(max_length=MOST_HANDLES)]


class Finished(_Message):
    """Says that these pages are not wanted here any more."""

    handle: Handle


def offered(welcome: Welcome) -> bytes:
    """Return the bytes that a producer's proof covers, besides the nonces: all that it says of itself."""
    return msgspec.msgpack.encode((welcome.engine_id, welcome.format, welcome.lease_seconds, welcome.offer))


ToProducer = Proof | Ask | SlotFree | Renew | Finished
ToConsumer = Hello | Welcome | Chunk | Refused
