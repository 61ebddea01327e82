"""The contract of the transfer room: sources of KV (the scheduler's side) and page movers (the runner's side).

It is the contract of vLLM's V1 connector in other words. A source is asked what it has of a prompt, loads pages, is
offered pages to store, and may have the pages of an ended request kept. The engine's thread calls it, between two
steps, so no method may wait for anything. What takes time a source does in threads of its own: these fill the pages of
a `PageLoad` and read those of a `PageSave`, both through a `PageMover`.

    here                           vLLM V1
    arrived, lookup                on_new_request, get_num_new_matched_tokens
    load, PageLoad.fill, .finish   update_state_after_alloc, start_load_kv, get_finished, get_block_ids_with_load_errors
    save, PageSave.read, .finish   build_connector_meta, save_kv_layer, get_finished
    ended, poll                    request_finished, get_finished
    forget, reset, close           (request_finished), reset_cache, shutdown
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tokenmill.core.request import CacheKey, FinishReason, TokenArray
from tokenmill.core.transfers import KVQuery
from tokenmill.engine.transfer.orders import PageLoad, PageSave

# The group of entry points that name sources of one's own: each a callable that takes a `SourceContext`.
SOURCE_PLUGINS = "tokenmill.kv_sources"


class PageMover(Protocol):
    """Copies whole pages between the KV memory and bytes, as they lie there. Any thread may call it, for pages that a
    load or a save holds: no step touches those.

    Attributes:
        page_bytes: bytes of a page over all layers.
        layout: says how these lie; pages of another layout mean nothing here.
    """

    page_bytes: int
    layout: str

    def read(self, page: int, data: memoryview) -> None:
        """Copy a page to `data`, of `page_bytes` bytes."""

    def write(self, page: int, data: memoryview) -> None:
        """Fill a page with what `read` gave."""


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source is made with.

    Attributes:
        fingerprint: of the model's weights and of how they and the KV are stored; KV of another one is worthless.
        num_pages: of the engine's KV memory.
        options: of the source, as the user has given them.
        engine: the index of the engine, where there are several.
    """

    mover: PageMover
    page_size: int
    num_pages: int
    fingerprint: str
    options: dict[str, Any] = field(default_factory=dict)
    engine: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a source has of a prompt.

    Attributes:
        num_tokens: from its beginning on; only whole pages count, and never the last token, which is always run.
        where: what the source wants to find again in the `LoadOrder`; it is recorded, and sent to every rank.
        keeps: once the request has ended by itself, its full pages are to stay until `poll` names them.
    """

    num_tokens: int = 0
    where: bytes = b""
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class KeptPages:
    """The full pages of a request that has ended; they stay as they are until they are released, or their time is up.

    Attributes:
        id: what `poll` names to release them.
        tokens: [len(page_ids) * page_size] int32.
        params: what its client has said to the sources.
    """

    id: int
    request_id: str
    cache_key: CacheKey
    tokens: TokenArray
    page_ids: list[int]
    reason: FinishReason
    params: dict[str, Any] | None


class KVSource(Protocol):
    """One place where KV may be, besides the pages of the engine. See the module's text.

    Attributes:
        name: in orders, logs and metrics.
        stores: it takes pages: `save` is called.
    """

    name: str
    stores: bool

    def arrived(self, request_id: str, params: dict[str, Any]) -> None:
        """A request has come with `kv_transfer_params`.

        Raises:
            InvalidRequest: they make no sense: they are a client's.
        """

    def lookup(self, query: KVQuery, params: dict[str, Any] | None) -> Answer | None:
        """What there is of a prompt. None: ask again later; the engine does so at each turn, up to a deadline."""

    def load(self, load: PageLoad) -> None:
        """Begin to fill pages. Each that was verified is given to `load.fill`; `load.finish` says that no more come."""

    def save(self, save: PageSave) -> None:
        """Pages are offered. `save.read` copies one; `save.finish` says that none is wanted any more."""

    def ended(self, kept: KeptPages) -> dict[str, Any] | None:
        """A request that `lookup` wanted kept has ended. Returns the `kv_transfer_params` of its reply."""

    def forget(self, request_id: str) -> None:
        """A request has begun or ended, and nothing more is loaded for it; called once for each that arrived with
        parameters or was looked up, also where it was aborted before that.
        """

    def poll(self) -> Iterable[int]:
        """Called at each turn of the engine. Returns the ids of kept pages that nobody needs any longer."""

    def expired(self, kept_id: int) -> None:
        """The time of kept pages is up: they are released, and must not be read any more."""

    def reset(self) -> None:
        """Forget all that is stored: an operator has asked for it."""

    def close(self) -> None:
        """The engine ends: finish what was begun, and let go of threads and files."""
