"""How decodes of different contexts are padded into a few batched products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.attention.batch import ForwardBatch
from tokenmill.attention.kv_pool import KVPool

SHORTEST = 32
FINE_FROM = 512
# Keys, or values, of a bucket in one layer. Gathered and used at once, they never leave the CPU's cache; and the
# copies stay small beside the KV cache itself.
BUCKET_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """n requests with one token each, all padded to the same number of pages.

    Attributes:
        tokens: [n] int64, their tokens in the batch.
        page_rows: rows of the pool of the P pages of each, n * P pages in all.
        hidden: [n, 1, L] bool, True at slots outside the request's context or window; L = P * page_size.
        stale: the same slots as int64 indices into n * L.
    """

    tokens: torch.Tensor
    page_rows: torch.Tensor
    hidden: torch.Tensor
    stale: torch.Tensor


def padded_lengths(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Round up to the ladder 32, 48, 64, 96, 128 ... 512, from there in quarters of an octave: 640, 768, 896, 1024."""
    lengths = np.maximum(lengths, SHORTEST)
    octave = np.exp2(np.ceil(np.log2(lengths))).astype(np.int64)
    step = np.where(lengths <= FINE_FROM, octave // 4, octave // 8)
    return -(-lengths // step) * step


def decode_buckets(batch: ForwardBatch, kv: KVPool, window: int | None) -> list[DecodeBucket]:
    """Sort the batch's single-token requests into buckets of equal padded length.

    With a window only the pages that it touches are taken.
    """
    page_size = kv.page_size
    requests = np.flatnonzero(batch.query_lens == 1)
    if not len(requests):
        return []
    ends = batch.context_lens[requests].astype(np.int64)
    begins = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    first_pages = begins // page_size
    num_pages = -(-padded_lengths(ends - first_pages * page_size) // page_size)
    buckets = []
    for chosen, count in _groups(num_pages, BUCKET_BYTES // kv.bytes_per_page):
        page_numbers = first_pages[chosen, None] + np.arange(count)
        slots = first_pages[chosen, None] * page_size + np.arange(count * page_size)
        hidden = (slots >= ends[chosen, None]) | (slots < begins[chosen, None])
        buckets.append(
            DecodeBucket(
                tokens=torch.from_numpy(batch.query_starts[requests[chosen]].astype(np.int64)),
                page_rows=kv.page_rows(_pages(batch.page_table, requests[chosen], page_numbers)),
                hidden=torch.from_numpy(hidden).unsqueeze(1),
                stale=torch.from_numpy(np.flatnonzero(hidden)),
            )
        )
    return buckets


def _groups(num_pages: npt.NDArray[np.int64], most: int) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
    """Indices of requests with equal numbers of pages, `most` pages in all unless one request alone has more."""
    for count in np.unique(num_pages).tolist():
        equal = np.flatnonzero(num_pages == count)
        size = max(1, most // count)
        for start in range(0, len(equal), size):
            yield equal[start : start + size], count


def _pages(
    page_table: torch.Tensor, requests: npt.NDArray[np.int64], page_numbers: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Page ids at [request, number], flat. Numbers beyond the table are padding: its slots are hidden."""
    inside = np.minimum(page_numbers, page_table.shape[1] - 1)
    table = page_table.index_select(0, torch.from_numpy(requests))
    return table.gather(1, torch.from_numpy(inside)).flatten()
