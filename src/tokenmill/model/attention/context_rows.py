"""Pages over devices: each of several ranks with a device of its own holds the pages of every so many ids.

    page ids      |1|2|3|4|5|6| ...       rank 0 has 1, 3, 5 ..., rank 1 has 2, 4, 6 ..., and each its own page 0

Where they are is known on the host: a table like that on the device follows the plans. From it come, step by step, the
decodes as this rank sees them (only its own pages, which are whole splits), the pages that it shows the other ranks for
prompts, and the places of what comes back in the order of one rank.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import StepPlan
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.context_step import ContextStep, OwnDecodes, OwnPrompts, own_pages
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent

# Rows of a prompt that one rank attends: whole tiles of the kernel, whatever heads share a key head.
QUERY_CHUNK = 128
_DECODES, _PROMPTS = "context_decodes_", "context_prompts_"
_Ints = npt.NDArray[np.integer[Any]]


class ContextRows(RowExtension):
    """The pages of rows, on the host of one of several ranks.

    Args:
        num_rows, max_pages: of the page table.
    """

    def __init__(self, rank: int, size: int, page_size: int, num_rows: int, max_pages: int) -> None:
        self._rank = rank
        self._size = size
        self._page_size = page_size
        self._ids = np.zeros((num_rows, max_pages), dtype=np.int32)

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in a plan's new pages."""
        self._ids[plan.page_rows, plan.page_numbers] = plan.page_ids
        return {}

    def split(self, plan: StepPlan, query_starts: npt.NDArray[np.int32], first: int) -> Arrays:
        """Return where the pages of the step are, and what this rank does of it."""
        assert first == 0, "ranks that share a context have no graphs"
        is_chunk = plan.num_scheduled > 1
        num_decodes = int(is_chunk.argmax()) if is_chunk.any() else len(is_chunk)
        lens = plan.num_computed + plan.num_scheduled
        tables, arrays = self._ids[plan.rows], Arrays()
        if num_decodes:
            arrays |= self._decodes(tables[:num_decodes], lens[:num_decodes])
        if num_decodes < len(lens):
            starts = query_starts[num_decodes:] - query_starts[num_decodes]
            arrays |= self._prompts(tables[num_decodes:], lens[num_decodes:], starts)
        return arrays

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Return the batch with the step as this rank sees it; it writes its own tokens, and the others to page 0."""
        pages = batch.slots // self._page_size
        own = own_pages(pages, self._rank, self._size)
        decodes = prompts = None
        if f"{_DECODES}order" in sent:
            decodes = OwnDecodes(**{name: sent[_DECODES + name] for name in OwnDecodes.__struct_fields__})
        if f"{_PROMPTS}order" in sent:
            parts: dict[str, Any] = {name: sent[_PROMPTS + name] for name in OwnPrompts.__struct_fields__}
            parts["are_shared"] = bool(arrays[f"{_PROMPTS}are_shared"])  # without asking the device
            prompts = OwnPrompts(**parts)
        slots = own * self._page_size + batch.slots % self._page_size
        return msgspec.structs.replace(batch, slots=slots, context=ContextStep(decodes, prompts))

    def _decodes(self, tables: _Ints, lens: _Ints) -> Arrays:
        size, page = self._size, self._page_size
        ids, counts = _cut(tables, lens, page)
        is_page = ids > 0
        owners = np.where(is_page, (ids - 1) % size, -1)
        places, of_rank = _places(owners, size)
        own = np.where(owners == self._rank, own_pages(ids, self._rank, size), 0)
        table = np.zeros((len(ids), max(1, int(of_rank[:, self._rank].max()))), dtype=np.int32)
        requests, numbers = np.nonzero(own)
        table[requests, places[requests, numbers]] = own[requests, numbers]
        is_last_own = owners[np.arange(len(ids)), counts - 1] == self._rank
        own_counts = of_rank[:, self._rank]
        room = max(1, int(of_rank.sum(0).max()))
        ends = of_rank.cumsum(0)
        begins = ends - of_rank
        where = owners * room + np.take_along_axis(begins, np.maximum(owners, 0), 1) + places
        own_lens = own_counts * page - is_last_own * (counts * page - lens)
        records = np.zeros((room, 4), dtype=np.int32)
        of_split = np.repeat(np.arange(len(ids)), own_counts)
        in_request = np.arange(len(of_split)) - np.repeat(begins[:, self._rank], own_counts)
        records[: len(of_split)] = np.stack((of_split, in_request, of_split, own_lens[of_split]), 1)
        return {
            f"{_DECODES}page_table": table,
            f"{_DECODES}lens": own_lens.astype(np.int32),
            f"{_DECODES}records": records,
            f"{_DECODES}stops": ends[:, self._rank].astype(np.int32),
            f"{_DECODES}order": where[is_page],
            f"{_DECODES}all_stops": counts.cumsum().astype(np.int32),
        }

    def _prompts(self, tables: _Ints, lens: _Ints, starts: _Ints) -> Arrays:
        size = self._size
        ids, _ = _cut(tables, lens, self._page_size)
        pages = np.unique(ids[ids > 0])
        owners = (pages - 1) % size
        places, of_rank = _places(owners[None], size)
        room = max(1, int(of_rank.max()))
        shown = np.zeros(room, dtype=np.int64)
        own = pages[owners == self._rank]
        shown[: len(own)] = own_pages(own, self._rank, size)
        where = np.append(owners * room + places[0], 0)
        found = np.where(ids > 0, where[np.searchsorted(pages, ids)], 0)

        begins, ends, requests = _chunks(starts)
        count, are_shared = np.arange(len(begins)), len(begins) >= size
        taker = np.minimum(count % (2 * size), 2 * size - 1 - count % (2 * size)) if are_shared else 0 * count
        is_taken = (taker == self._rank) | (not are_shared)
        of_token = np.repeat(taker, ends - begins)
        (rows,) = np.nonzero(np.repeat(is_taken, ends - begins))
        row_places, rows_of_rank = _places(of_token[None], size)
        most = int(rows_of_rank.max())
        return {
            f"{_PROMPTS}pages": shown,
            f"{_PROMPTS}page_table": found[requests[is_taken]].astype(np.int32),
            f"{_PROMPTS}lens": (lens[requests] - (starts[requests + 1] - ends))[is_taken].astype(np.int32),
            f"{_PROMPTS}starts": np.append(0, (ends - begins)[is_taken].cumsum()).astype(np.int32),
            f"{_PROMPTS}rows": np.append(rows, np.zeros(most - len(rows), dtype=np.int64)),
            f"{_PROMPTS}order": of_token * most + row_places[0],
            f"{_PROMPTS}are_shared": np.array([are_shared]),
        }


def _cut(tables: _Ints, lens: _Ints, page_size: int) -> tuple[_Ints, _Ints]:
    """Return the page ids of requests, [B, P], 0 behind the last; and how many each has."""
    counts = -(-lens // page_size)
    numbers = np.arange(counts.max())
    return np.where(numbers < counts[:, None], tables[:, : len(numbers)], 0).astype(np.int64), counts


def _places(owners: _Ints, size: int) -> tuple[_Ints, _Ints]:
    """Return for each of [B, n] its place among those of the same owner in its row, and how many each has, [B, size].

    Owners below 0 have none.
    """
    places, counts = np.zeros_like(owners), np.zeros((len(owners), size), dtype=np.int64)
    for rank in range(size):
        is_own = owners == rank
        places = np.where(is_own, is_own.cumsum(1) - 1, places)
        counts[:, rank] = is_own.sum(1)
    return places, counts


def _chunks(starts: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """Return where chunks of `QUERY_CHUNK` rows of each request begin and end, and their requests."""
    counts = -(-np.diff(starts) // QUERY_CHUNK)
    requests = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(requests)) - np.repeat(counts.cumsum() - counts, counts)
    begins = starts[requests] + numbers * QUERY_CHUNK
    return begins, np.minimum(begins + QUERY_CHUNK, starts[requests + 1]), requests
