"""`kv_transfer_params` of requests and replies, with vLLM's names, so that its proxies work: a client's input.

    proxy -> producer   do_remote_decode                       compute the prompt, and hold its pages
    producer -> proxy   do_remote_prefill, the address and the handle
    proxy -> consumer   the same, unchanged

Nothing in them is an address of memory. The host and port are looked up among the peers that the consumer was started
with, and the handle among the producer's leases.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenmill.core.errors import InvalidRequest
from tokenmill.engine.transfer.remote.messages import Handle
from tokenmill.ipc.address import Address

PARAM = "kv_transfer_params"
# A nonce of 128 bits, as the numbers that vLLM's routers expect under `remote_block_ids`.
_NONCE_WORDS = 4

_Label = Annotated[str, Meta(max_length=128)]
_Word = Annotated[int, Meta(ge=0, lt=1 << 32)]


class TransferParams(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The parameters of one request. A proxy sends fields that it has no value for as null.

    Attributes:
        do_remote_decode: another engine goes on with this prompt: hold its pages.
        do_remote_prefill: another engine has computed the prompt: get its pages.
        remote_block_ids: opaque; from the reply of the producer.
        remote_num_tokens: number of the prompt's tokens that have pages there.
        tp_size: number of the producer's ranks.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: _Label | None = None
    remote_request_id: _Label | None = None
    remote_block_ids: Annotated[list[_Word], Meta(max_length=_NONCE_WORDS)] | None = None
    remote_host: Annotated[str, Meta(max_length=255)] | None = None
    remote_port: Annotated[int, Meta(ge=0, le=65_535)] | None = None
    remote_num_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    tp_size: Annotated[int, Meta(ge=1, le=1 << 16)] | None = None

    @property
    def address(self) -> Address:
        """Address of the producer that has the pages."""
        return Address(self.remote_host or "", self.remote_port or 0)

    @property
    def handle(self) -> Handle:
        """Handle of the pages at the producer."""
        nonce = "".join(f"{word:08x}" for word in self.remote_block_ids or ())
        return Handle(self.remote_engine_id or "", self.remote_request_id or "", nonce)


def parse_params(params: dict[str, Any]) -> TransferParams:
    """Read a client's parameters.

    Raises:
        InvalidRequest: they are invalid; it names the field at fault.
    """
    try:
        parsed = msgspec.convert(params, TransferParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{PARAM}: {error}", PARAM) from error
    if parsed.do_remote_decode and parsed.do_remote_prefill:
        raise InvalidRequest(f"{PARAM}: do_remote_decode and do_remote_prefill exclude each other", PARAM)
    if parsed.do_remote_prefill:
        for name in ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_num_tokens"):
            if getattr(parsed, name) is None:
                raise InvalidRequest(f"{PARAM}: do_remote_prefill needs {name}", PARAM)
    return parsed


def offer_params(
    engine_id: str, request_id: str, address: Address, num_tokens: int, tp_size: int = 1
) -> TransferParams:
    """Return a producer's answer: its pages of a prompt, under a nonce that cannot be guessed."""
    return TransferParams(
        do_remote_prefill=True,
        remote_engine_id=engine_id,
        remote_request_id=request_id,
        remote_block_ids=[secrets.randbits(32) for _ in range(_NONCE_WORDS)],
        remote_host=address.host,
        remote_port=address.port,
        remote_num_tokens=num_tokens,
        tp_size=tp_size,
    )
