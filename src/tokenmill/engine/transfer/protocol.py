"""The contract of the transfer room: sources of KV (the scheduler's side) and page movers (the runner's side).

It is the contract of vLLM's V1 connector in other words. A source is asked what it has of a prompt, loads pages, is
offered pages to store, and may have the pages of an ended request kept. The engine's thread calls it, between two
steps, so no method may wait for anything. A source does slow work in threads of its own: these fill the pages of a
`PageLoad` and read those of a `PageSave`, both through a `PageMover`.

    here                           vLLM V1
    arrived, lookup                on_new_request, get_num_new_matched_tokens
    load, PageLoad.fill, .finish   update_state_after_alloc, start_load_kv, get_finished, get_block_ids_with_load_errors
    save, PageSave.read, .finish   build_connector_meta, save_kv_layer, get_finished
    ended, poll                    request_finished, get_finished
    forget, reset, close           (request_finished), reset_cache, shutdown
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgspec

from tokenmill.core.request import CacheKey, FinishReason, TokenArray
from tokenmill.core.transfers import KVQuery
from tokenmill.engine.transfer.orders import PageLoad, PageMover, PageSave


class SourceContext(msgspec.Struct, frozen=True):
    """The engine's side of a new source: what a plug-in may use to make it.

    Attributes:
        fingerprint: of the model's weights and of the format of weights and KV; KV of another one is worthless.
        num_pages: pages in the engine's KV memory.
        options: the source's own, as the user has given them: `kv_connector_extra_config`.
        role: kv_producer, kv_consumer or kv_both; a producer is asked to load nothing, a consumer to store nothing.
        engine: the index of the engine, where there are several.
        states: moves recurrent states, slot by slot; None: the model has none.
        windows: moves pages of the window group; None: there is no such group. window: most tokens that it serves.
    """

    mover: PageMover
    page_size: int
    num_pages: int
    fingerprint: str
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    engine: int = 0
    states: PageMover | None = None
    role: str = "kv_both"
    windows: PageMover | None = None
    window: int = 0


class Answer(msgspec.Struct, frozen=True):
    """A source's answer to a query: how much of the prompt it has.

    Attributes:
        num_tokens: tokens from the prompt's beginning on, in whole pages, without the last token, which is always run.
        where: the source's own note, which comes back in the `LoadOrder`; it is recorded, and sent to every rank.
        keeps: True if the full pages must stay until `poll` names them, once the request has ended by itself.
    """

    num_tokens: int = 0
    where: bytes = b""
    keeps: bool = False


class KeptPages(msgspec.Struct, frozen=True):
    """The full pages of a request that has ended. They stay as they are until released, or until their time is up.

    Attributes:
        id: the id that `poll` returns to release them.
        tokens: [len(page_ids) * page_size] int32.
        params: the client's `kv_transfer_params`.
        windows: pages of the window group by the number of their full page: those before the end of the prompt and
            before the newest page, as far as there was room to keep them.
        states: slots of recurrent states by the number of pages that one stands behind: those nearest to the end of the
            prompt and to the newest page, as far as half of all slots reaches.
    """

    id: int
    request_id: str
    cache_key: CacheKey
    tokens: TokenArray
    page_ids: list[int]
    reason: FinishReason
    params: dict[str, Any] | None
    windows: dict[int, int] = {}
    states: dict[int, int] = {}


class KVSource(Protocol):
    """A place where KV may be, besides the pages of the engine. See the module's text.

    Attributes:
        name: its name in orders, logs and metrics.
        stores: True if it takes pages: `save` is called.

    A class, or what makes the source, may have an attribute `serves_windows`. Where it is True, layers with a window
    have pages of their own: the source stores what `PageSave.order.windows` names, answers a lookup only with an end
    before which it has a whole window, and fills `PageLoad.order.windows`. Else it meets whole pages alone.

    Likewise `serves_states`: True lets it serve a model with recurrent states. It stores those that
    `PageSave.order.states` names, by `read_state`, answers with an end behind which it has one, and fills it.
    """

    name: str
    stores: bool

    def arrived(self, request_id: str, params: dict[str, Any]) -> None:
        """Take note of a request that has come with `kv_transfer_params`.

        Raises:
            InvalidRequest: the client's parameters make no sense.
        """

    def lookup(self, query: KVQuery, params: dict[str, Any] | None) -> Answer | None:
        """Return what it has of a prompt, or None to be asked again in each iteration of the loop, up to a deadline."""

    def load(self, load: PageLoad) -> None:
        """Begin to fill pages. Give each verified page to `load.fill`, and call `load.finish` when no more come."""

    def save(self, save: PageSave) -> None:
        """Begin to store pages. Copy them by `save.read`, and call `save.finish` when no more are wanted."""

    def ended(self, kept: KeptPages) -> dict[str, Any] | None:
        """Receive the pages that `lookup` wanted kept, of an ended request; return its reply's `kv_transfer_params`."""

    def forget(self, request_id: str) -> None:
        """Forget a request that has begun or ended: nothing more is loaded for it.

        Called once for each request that arrived with parameters or was looked up, also if it was aborted before that.
        """

    def poll(self) -> Iterable[int]:
        """Return the ids of kept pages that are not needed any longer. Called at each iteration of the engine."""

    def expired(self, kept_id: int) -> None:
        """Stop reading kept pages whose time is up: they are released."""

    def reset(self) -> None:
        """Forget everything that is stored, as an operator has asked."""

    def close(self) -> None:
        """Finish what was begun, and let go of threads and files: the engine ends."""
