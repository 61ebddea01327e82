"""A step over pages on several devices, as one of them sees it. Where pages are, their ids say: see `context_rows`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray


class OwnDecodes(msgspec.Struct, frozen=True):
    """The decodes of a step as one of several ranks sees them; arrays on the device. A split is a page.

    Attributes:
        page_table: [D, P] int32, of this rank's pages alone. lens: [D] int32, the keys in them.
        records: [N, 4] int32, the splits of this rank; zeros behind the last. stops: [D] int32, where those of each
            request end. Both are as in `Splits`.
        order: [S] int64, the places of all splits, request by request, among the N of rank 0, the N of rank 1, ...
        all_stops: [D] int32, where those of each request end.
    """

    page_table: AnyArray
    lens: AnyArray
    records: AnyArray
    stops: AnyArray
    order: AnyArray
    all_stops: AnyArray


class OwnPrompts(msgspec.Struct, frozen=True):
    """The other requests of a step as one of several ranks sees them; arrays on the device.

    Attributes:
        pages: [N] int64, this rank's pages of these requests; zeros behind the last.
        page_table: [U, P] int32, pages among the N of rank 0, the N of rank 1, ...; of the chunks that this rank
            attends. lens: [U] int32, the keys that each chunk sees. starts: [U + 1] int32, its first row.
        rows: [R] int64, their tokens; the first of all repeated behind the last.
        order: [T] int64, the place of each token among the R of rank 0, the R of rank 1, ...
        are_shared: False if each rank attends all rows: then none have to be brought together.
    """

    pages: AnyArray
    page_table: AnyArray
    lens: AnyArray
    starts: AnyArray
    rows: AnyArray
    order: AnyArray
    are_shared: bool


class ContextDevices(msgspec.Struct, frozen=True):
    """Ranks with a device each, over which the pages of a KV cache are spread, as one of them sees them.

    Attributes:
        gather: returns the tensors of all ranks, [ranks, *shape]; see `Communicator`.
    """

    rank: int
    size: int
    gather: Callable[[Any], Any]


class ContextStep(msgspec.Struct, frozen=True):
    """A step over pages on several devices: the decodes at its front, and everything from the first chunk on."""

    decodes: OwnDecodes | None
    prompts: OwnPrompts | None


def own_pages(ids: AnyArray, rank: int, size: int) -> AnyArray:
    """Return where a rank has pages in its own memory; 0 for those of other ranks, and for page 0."""
    return ((ids - 1) // size + 1) * ((ids - 1) % size == rank)


def num_own_pages(num_pages: int, size: int) -> int:
    """Return the pages in the memory of each of `size` ranks that together hold so many, page 0 included in both."""
    return -(-(num_pages - 1) // size) + 1
