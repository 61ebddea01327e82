"""`RemoteSource`: other engines as a source of KV, and this one as a source for them.

    consumer   arrived: renew the lease ─ lookup ─ load: fetch ─ forget: tell the producer to end the lease
    producer   lookup: keep its pages ─ ended: grant a lease ─ poll: leases that have ended

The engine's thread never waits here: links and the page server have threads of their own.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tokenmill.config.kv_transfer import NIXL, KVTransferConfig
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.transfers import KVQuery
from tokenmill.engine.transfer.host_pages import HostPages
from tokenmill.engine.transfer.orders import PageLoad, PageMover, PageSave
from tokenmill.engine.transfer.protocol import Answer, KeptPages, SourceContext
from tokenmill.engine.transfer.remote.channel import TransferError
from tokenmill.engine.transfer.remote.client import MakeReceiver, PageClient
from tokenmill.engine.transfer.remote.leases import Lease, LeaseTable
from tokenmill.engine.transfer.remote.links import Fetch, PageLinks
from tokenmill.engine.transfer.remote.messages import OF_STATES, OF_WINDOWS, Handle, PageFormat
from tokenmill.engine.transfer.remote.params import PARAM, TransferParams, offer_params, parse_params
from tokenmill.engine.transfer.remote.server import PageServer, Producer
from tokenmill.engine.transfer.remote.transports import NUM_SLOTS, Sender, Store, StreamSender, WindowSender
from tokenmill.ipc.address import Address
from tokenmill.ipc.secret import Secret
from tokenmill.platform.host_arrays import host_array

if TYPE_CHECKING:
    from tokenmill.engine.transfer.remote.nixl_transport import NixlAgent
    from tokenmill.platform.arrays import Array

logger = logging.getLogger(__name__)


class Beside(msgspec.Struct, frozen=True):
    """Memory and format of pages of a window group, or of recurrent states."""

    memory: HostPages
    format: PageFormat


class RemoteSource:
    """A source that asks producers, or is one, or both."""

    name = "remote"
    stores = False

    def __init__(
        self,
        config: KVTransferConfig,
        memory: HostPages,
        format: PageFormat,
        engine: int = 0,
        beside: Mapping[str, Beside] | None = None,
    ) -> None:
        """Set up the links of a consumer, the server of a producer, or both.

        Args:
            memory: KV memory of this engine.
            format: format of its pages.
            engine: its index, where a server has several.
            beside: by kind, `OF_WINDOWS` or `OF_STATES`, what goes with pages.

        Raises:
            InvalidConfig: the secret cannot be read, or the address cannot be bound.
        """
        extra = config.kv_connector_extra_config
        self._config = config
        self._memory = memory
        self._page_size, self._tp_size = format.page_size, format.tp_size
        self._params: dict[str, TransferParams] = {}
        self._wanted: Counter[tuple[Address, Handle]] = Counter()
        self._empty: list[int] = []
        secret = Secret.read(extra.secret_file)
        self.engine_id = f"{config.engine_id or secrets.token_hex(8)}" + (f"-{engine}" if engine else "")
        self.leases = LeaseTable(extra.lease_seconds, extra.most_lease_seconds)
        agent = _nixl_agent() if config.kv_connector == NIXL else None
        peers = [Address.parse(peer) for peer in extra.peers] if config.consumes else []

        def links(format: PageFormat, kind: str) -> PageLinks:
            def connect(address: Address) -> PageClient:
                transport, make = transport_to(address, agent)
                return PageClient(address, secret, format, transport + kind, make)

            return PageLinks(peers, connect, format.page_bytes)

        self._links = links(format, "")
        # Connections of their own: a transport has pages of one size.
        self._beside = {kind: links(one.format, kind) for kind, one in (beside or {}).items()}
        self.server: PageServer | None = None
        if config.produces:
            offers = senders(memory.page_bytes, agent)
            producer = Producer(self.engine_id, format, secret, self.leases, memory.copy_out, offers)
            others = [_of_kind(producer, kind, one, agent) for kind, one in (beside or {}).items()]
            self.server = PageServer(address_of(config, engine), producer, others)
            self.server.start()

    # --- requests come and go ---------------------------------------------------------------------------------------

    def arrived(self, request_id: str, params: dict[str, Any]) -> None:
        """Check a client's parameters, and hold the producer's pages that they name."""
        parsed = parse_params(params)
        if parsed.do_remote_decode and not self._config.produces:
            raise InvalidRequest(f"{PARAM}: do_remote_decode needs a producer; this is a {self._config.kv_role}", PARAM)
        if not parsed.do_remote_prefill:
            return
        if not self._config.consumes:
            raise InvalidRequest(f"{PARAM}: do_remote_prefill needs a consumer; this is a kv_producer", PARAM)
        if parsed.address not in self._links:
            raise InvalidRequest(f"{PARAM}: this server knows no producer at that remote_host and remote_port", PARAM)
        self._params[request_id] = parsed
        self._wanted[parsed.address, parsed.handle] += 1
        self._links.to(parsed.address).hold(parsed.handle)

    def forget(self, request_id: str) -> None:
        """Forget a request. The last of the requests that share a prompt lets the producer go."""
        parsed = self._params.pop(request_id, None)
        if parsed is None:
            return
        key = parsed.address, parsed.handle
        self._wanted[key] -= 1
        if not self._wanted[key]:
            del self._wanted[key]
            self._links.to(parsed.address).drop(parsed.handle)

    # --- the consumer's side ----------------------------------------------------------------------------------------

    def lookup(self, query: KVQuery, params: dict[str, Any] | None) -> Answer:
        """Return how many tokens the producer has, as the client says. The pages are checked when they are loaded."""
        keeps = bool(params and params.get("do_remote_decode"))
        parsed = self._params.get(query.request_id)
        if parsed is None:
            return Answer(keeps=keeps)
        return Answer(min(parsed.remote_num_tokens or 0, len(query.tokens)))

    def load(self, load: PageLoad) -> None:
        """Fetch the pages of a load from its producer."""
        parsed = self._params.get(load.order.request_id)
        if parsed is None:
            load.finish()
            return
        first, count, tell = load.order.first_page, len(load.order.page_ids), _teller(load, parsed.address)
        deadline = time.monotonic() + self._config.kv_connector_extra_config.fetch_seconds

        def fetch(links: PageLinks, first: int, count: int, store: Store, done: Callable[[str], None]) -> None:
            whose, size = (parsed.handle, load.cache_key, load.tokens), self._page_size
            order = Fetch(*whose, size, first, count, store, deadline, lambda: not load.is_over, done)
            links.to(parsed.address).fetch(order)

        def fetch_pages(why: str = "") -> None:
            if why:
                tell(why)
            else:
                fetch(self._links, first, count, self._storer(load), tell)

        # First what a producer may lack: without it nobody can begin behind the pages.
        end = first + count
        if load.order.windows:
            windows = len(load.order.windows)
            store = _storer_beside(load, load.fill_windows)
            fetch(self._beside[OF_WINDOWS], end - windows, windows, store, fetch_pages)
        elif load.order.state_slot >= 0:
            fetch(self._beside[OF_STATES], end - 1, 1, _storer_beside(load, load.fill_good_state), fetch_pages)
        else:
            fetch_pages()

    def _storer(self, load: PageLoad) -> Callable[[int, memoryview, list[int]], None]:
        def store(first: int, data: memoryview, checksums: list[int]) -> None:
            def write(pages: list[int]) -> int:
                found = self._memory.copy_in(pages, data)
                return next((i for i in range(len(found)) if found[i] != checksums[i]), len(found))

            good = load.fill_some(first, len(checksums), write)
            if good < len(checksums):
                raise TransferError("the request has ended" if load.is_over else f"page {first + good} is damaged")

        return store

    # --- the producer's side ----------------------------------------------------------------------------------------

    def ended(self, kept: KeptPages) -> dict[str, Any] | None:
        """Grant a lease on kept pages, and return the parameters that the consumer needs."""
        num_pages = len(kept.page_ids)
        if OF_STATES in self._beside:  # nobody can begin behind the last one
            num_pages = max(kept.states, default=0)
        lacks_windows = OF_WINDOWS in self._beside and not kept.windows
        if not num_pages or lacks_windows or self.server is None:
            self._empty.append(kept.id)
            return None
        pages, tokens = kept.page_ids[:num_pages], kept.tokens[: num_pages * self._page_size]
        beside = {OF_WINDOWS: kept.windows, OF_STATES: {number - 1: slot for number, slot in kept.states.items()}}
        offer = offer_params(self.engine_id, kept.request_id, self.server.address, len(tokens), self._tp_size)
        self.leases.grant(Lease(kept.id, offer.handle, pages, kept.cache_key, tokens, beside))
        told: dict[str, Any] = msgspec.to_builtins(offer)
        return told | {"do_remote_decode": False}

    def poll(self) -> Iterable[int]:
        """Return the ids of kept pages whose lease has ended, or that never had one."""
        empty, self._empty = self._empty, []
        return empty + self.leases.take_ended() if empty or len(self.leases) else ()

    def expired(self, kept_id: int) -> None:
        """End the lease of kept pages whose time is up."""
        self.leases.withdraw(kept_id)

    # --- what is not for this source --------------------------------------------------------------------------------

    def save(self, save: PageSave) -> None:
        """Finish at once: this source stores nothing."""
        save.finish(is_saved=False)

    def reset(self) -> None:
        """Do nothing: the pages of other engines are not ours to forget."""

    def close(self) -> None:
        """Close the server and the links."""
        if self.server is not None:
            self.server.close()
        self._links.close()
        for links in self._beside.values():
            links.close()


def remote_source(
    config: KVTransferConfig,
    context: SourceContext,
    pieces: Sequence[Array],
    layout: str,
    beside: Mapping[str, Sequence[Array]],
    sizes: tuple[int, int] = (1, 1),
) -> RemoteSource:
    """Return the source of an engine whose KV lies in these pieces of the host's memory.

    Args:
        layout: name of the attention backend, which determines the layout of pages.
        pieces: those of all ranks, one rank's behind another's.
        beside: by kind, `OF_WINDOWS` or `OF_STATES`, the pieces of what goes with pages; empty: there is no such kind.
        sizes: how many ranks share the heads, and how many stages the layers.

    Raises:
        InvalidConfig: see `RemoteSource`.
    """

    def described(pieces: Sequence[Array], mover: PageMover | None) -> Beside:
        assert mover is not None, "what has memory has a mover"
        memory = HostPages([host_array(piece).view(np.uint8) for piece in pieces])
        # The second word tells shapes and types apart that have the same name and size.
        kind, whose = f"{layout} {mover.layout[:8]}", context.fingerprint
        size = memory.page_bytes
        format = PageFormat(whose, kind, context.page_size, size, sizes[0], memory.checksum, sizes[1])
        return Beside(memory, format)

    pages = described(pieces, context.mover)
    movers = {OF_WINDOWS: context.windows, OF_STATES: context.states}
    others = {kind: described(some, movers[kind]) for kind, some in beside.items() if some}
    return RemoteSource(config, pages.memory, pages.format, context.engine, others)


def _of_kind(producer: Producer, kind: str, beside: Beside, agent: NixlAgent | None) -> Producer:
    """Return a producer with what goes with its pages instead of them."""
    # One state is sent at a time, and may be large.
    made = senders(beside.memory.page_bytes, agent, 1 if kind == OF_STATES else NUM_SLOTS)
    offers = {name + kind: make for name, make in made.items()}
    whose = {"format": beside.format, "copy_out": beside.memory.copy_out}
    return msgspec.structs.replace(producer, **whose, senders=offers, kind=kind)


def address_of(config: KVTransferConfig, engine: int) -> Address:
    """Return the address where engine `engine` listens: each takes the next port, or a name with its index."""
    socket = config.kv_connector_extra_config.socket
    if socket is not None:
        return Address(f"unix:{socket}" + (f".{engine}" if engine else ""))
    return Address(config.kv_ip, config.kv_port + engine)


def transport_to(address: Address, agent: NixlAgent | None) -> tuple[str, MakeReceiver | None]:
    """Return the name of the transport to an address, and a maker of its receiver if it needs more than usual."""
    if agent is not None:
        from tokenmill.engine.transfer.remote.nixl_transport import NixlReceiver

        return "nixl", partial(NixlReceiver, agent=agent)
    return ("window" if address.is_unix else "stream"), None


def senders(
    page_bytes: int, agent: NixlAgent | None = None, num_slots: int = NUM_SLOTS
) -> dict[str, Callable[[], Sender]]:
    """Return all transports that a producer offers: by name, what makes a sender."""
    if agent is not None:
        from tokenmill.engine.transfer.remote.nixl_transport import NixlSender

        return {"nixl": lambda: NixlSender(page_bytes, agent, num_slots)}
    return {"stream": lambda: StreamSender(page_bytes), "window": lambda: WindowSender(page_bytes, num_slots)}


def _nixl_agent() -> NixlAgent:
    from tokenmill.engine.transfer.remote.nixl_transport import NixlAgent

    return NixlAgent()


def _storer_beside(load: PageLoad, fill: Callable[[int, memoryview, list[int]], int]) -> Store:
    """Return what takes in window pages or a state by `fill`, which tells how many were right."""

    def store(first: int, data: memoryview, checksums: list[int]) -> None:
        if fill(first, data, checksums) < len(checksums):
            raise TransferError("the request has ended" if load.is_over else "what goes with the pages is damaged")

    return store


def _teller(load: PageLoad, address: Address) -> Callable[[str], None]:
    def done(why: str) -> None:
        if why and not load.is_over:
            num_missing = len(load.order.page_ids) - load.num_filled
            logger.warning("%d pages could not be fetched from %s: %s", num_missing, address, why)
        load.finish()

    return done
