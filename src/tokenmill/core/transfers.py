"""KV transfers between an engine and its sources: the orders of a plan, and the events that come back.

    scheduler ──(KVQuery)──> sources ──(Found)──> scheduler ──(PlanTransfers, in a plan)──> sources
    sources ──(Loaded, Released)──> scheduler

Orders are part of a plan and events are recorded as they come in, so a step log replays without any source.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from tokenmill.core.request import CacheKey, TokenArray


class KVQuery(msgspec.Struct, frozen=True):
    """A question to the sources about the KV of a request's tokens.

    Attributes:
        tokens: of the whole pages that may be loaded; the last token of a prompt is always run.
        num_local_tokens: how many of them, from the first on, the engine has itself.
    """

    request_id: str
    cache_key: CacheKey
    tokens: TokenArray
    num_local_tokens: int


class TransferSettings(msgspec.Struct, frozen=True):
    """Settings that decide which pages are saved.

    Attributes:
        stores: the names of the sources that store pages; empty: no page is saved.
        save_chunk: new pages of a running request that are saved without waiting for its end.
        min_saved: pages of the shortest prefix that is saved when its request ends; before memory is given up, all are.
    """

    stores: tuple[str, ...] = ()
    save_chunk: int = 64
    min_saved: int = 4


class LoadOrder(msgspec.Struct, frozen=True):
    """Fill pages from a source.

    Attributes:
        id: of this order; never used again.
        source: the name of the source that has them.
        first_page: number of pages of the prompt before them.
        page_ids: the pages to be filled, in order.
        where: the source's own note of their place; only the source reads it.
        state_slot: to be filled with the recurrent state behind the last page; -1: the model has no states.
        windows: pages of the window group, to be filled with what belongs to the last ones of these pages, in order.
    """

    id: int
    request_id: str
    source: str
    first_page: int
    page_ids: list[int]
    where: bytes
    state_slot: int = -1
    windows: list[int] | UnsetType = UNSET


class SaveOrder(msgspec.Struct, frozen=True):
    """Offer pages to the sources that store them; they stay as they are until `Released`, and so do the states.

    Attributes:
        first_page: number of pages of the prefix before them.
        states: recurrent states of the prefix: the number of its pages that one stands behind, and its slot.
        source: the only source that is offered them; "": all that store. where: its own note of an export.
        windows: pages of the window group: the number of the page of the prefix that one belongs to, and its id.
    """

    id: int
    first_page: int
    page_ids: list[int]
    states: list[tuple[int, int]] = []
    source: str = ""
    where: str = ""
    windows: list[tuple[int, int]] | UnsetType = UNSET


class PlanTransfers(msgspec.Struct, frozen=True):
    """The pages that a step loads and saves besides running its requests."""

    loads: list[LoadOrder]
    saves: list[SaveOrder]


class _TransferEvent(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages from sources to a scheduler, between two steps; the class name is the tag."""


class Found(_TransferEvent, frozen=True):
    """The answer to a `KVQuery`.

    Attributes:
        source: the name of the source that has the KV; empty: none has any.
        num_tokens: from the beginning of the prompt on, including those that the engine has itself.
        kept_for: the source for which the request's full pages are kept, once it has ended by itself, until released.
    """

    request_id: str
    source: str = ""
    num_tokens: int = 0
    where: bytes = b""
    kept_for: str = ""


class Loaded(_TransferEvent, frozen=True):
    """Report that a load is over. Its pages are filled and verified up to the first `num_tokens` of the prompt.

    Attributes:
        has_state: the recurrent state behind its last page is filled too.
    """

    id: int
    num_tokens: int
    has_state: bool = False


class Released(_TransferEvent, frozen=True):
    """Report that pages are no longer read from outside: they are saved, or were kept and are released.

    Attributes:
        is_saved: False: no source has stored them.
    """

    id: int
    is_saved: bool = True


class Export(_TransferEvent, frozen=True):
    """Ask for all that is cached of a prefix, for one source, whether it is stored anywhere or not.

    Attributes:
        where: the source's own note, which comes back in the `SaveOrder`.
        prompt: of the tokens, those of the last prompt: another turn may begin behind them.
    """

    source: str
    where: str
    cache_key: CacheKey
    tokens: list[int]
    prompt: int = 0


class Encoded(_TransferEvent, frozen=True):
    """Report that the encoder output of a content can be loaded from outside, or that it should not be any more.

    Attributes:
        is_there: False: no request shows the content, or a load has failed.
        has_failed: a step that was to load it has encoded the content instead.
    """

    digest: str
    is_there: bool = True
    has_failed: bool = False


TransferEvent = Found | Loaded | Released | Export | Encoded
