"""KV that comes from elsewhere and goes elsewhere: what a plan orders, and the news that comes back.

    scheduler ──(KVQuery)──> sources ──(Found)──> scheduler ──(PlanTransfers, in a plan)──> sources
    sources ──(Loaded, Released)──> scheduler

Orders are part of a plan and news are recorded as they come in, so a step log replays without any source.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tokenmill.core.request import CacheKey, TokenArray


@dataclass(frozen=True, slots=True)
class KVQuery:
    """Whose KV is looked for.

    Attributes:
        tokens: of whole pages, as far as they may come from elsewhere: the last token of a prompt is always run.
        num_local_tokens: the first ones of them that the engine has itself.
    """

    request_id: str
    cache_key: CacheKey
    tokens: TokenArray
    num_local_tokens: int


class TransferSettings(msgspec.Struct, frozen=True):
    """What decides which pages are saved.

    Attributes:
        stores: the names of the sources that store pages; none: nothing is saved.
        save_chunk: new pages of a running request at which it does not wait for the request's end.
        min_saved: pages of the shortest prefix that is saved.
    """

    stores: tuple[str, ...] = ()
    save_chunk: int = 64
    min_saved: int = 4


class LoadOrder(msgspec.Struct, frozen=True):
    """Fill pages from a source.

    Attributes:
        id: of this order; never used again.
        source: the name of the source that has found them.
        first_page: how many pages of the prompt stand before them.
        page_ids: the pages to be filled, in order.
        where: what the source has said of where they lie; its own business.
    """

    id: int
    request_id: str
    source: str
    first_page: int
    page_ids: list[int]
    where: bytes


class SaveOrder(msgspec.Struct, frozen=True):
    """Offer pages to the sources that store them; they stay as they are until `Released`.

    Attributes:
        first_page: how many pages of the prefix stand before them.
    """

    id: int
    first_page: int
    page_ids: list[int]


class PlanTransfers(msgspec.Struct, frozen=True):
    """What a step moves besides running its requests."""

    loads: list[LoadOrder]
    saves: list[SaveOrder]


class _News(msgspec.Struct, frozen=True, tag=True):
    """What sources tell a scheduler, between two steps; the class name is the tag."""


class Found(_News, frozen=True):
    """The answer to a `KVQuery`.

    Attributes:
        source: who has it; empty: nobody has anything.
        num_tokens: from the beginning of the prompt on, those that the engine has itself among them.
        kept_for: once the request has ended by itself, its full pages stay until this source releases them.
    """

    request_id: str
    source: str = ""
    num_tokens: int = 0
    where: bytes = b""
    kept_for: str = ""


class Loaded(_News, frozen=True):
    """A load is over. Its pages are there, and verified, up to the first `num_tokens` of the prompt."""

    id: int
    num_tokens: int


class Released(_News, frozen=True):
    """Nobody outside reads these pages any longer: they are saved, or were kept and are let go.

    Attributes:
        is_saved: False: nobody has stored them.
    """

    id: int
    is_saved: bool = True


KVNews = Found | Loaded | Released
