"""Split the contexts of decodes among the programs of a GPU, at positions that depend on neither batch nor length.

|256|256| ... 16 of them |512|512| ... 16 of them |1024| ...      keys of split 0, 1, ... of every request

Where a page is as long as the first splits, all are: a split is a page, which may lie on any of several devices.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import triton

from tokenmill.model.kernels.triton.launch import dependent
from tokenmill.model.kernels.triton.split_lists import find_neighbours, list_items

SPLIT_KEYS = 256
# After so many splits they are twice as long.
LEVEL_SPLITS = 16
LEVELS = 10
# Never: every split is a page.
ALL_ALIKE = 1 << 20
SPLIT_ENDS = np.cumsum(SPLIT_KEYS << np.arange(LEVELS * LEVEL_SPLITS) // LEVEL_SPLITS).astype(np.int32)
# Behind the sum of a part: its highest score, its total weight, and what keeps sums aligned.
PART_EXTRA = 4
# Rows of a tile (tokens * heads of a group) of prompts; of decodes it is the smallest that matrix units take. Exact
# products of float32 run beside those units, in registers: larger tiles spill them, and take long to compile.
PROMPT_ROWS = 128
DECODE_ROWS = 16
# Programs on a multiprocessor hide each other's waits; at 70 KiB each, three fit into the shared memory of an H200's.
# Of those whose tiles have more rows, for drafts, two do.
PROGRAMS_PER_UNIT = 3
# Of a thread, so that there is room for them: a multiprocessor has 64 Ki.
SPLIT_REGISTERS = (64 << 10) // (PROGRAMS_PER_UNIT * 128) // 8 * 8
# Requests of the largest graph.
MOST_CAPTURED = 512


class Shares(msgspec.Struct, frozen=True):
    """Splits that are read once for neighbours in an order of the requests; tensors on the device.

    |0 1 2 3 . .|        splits of the first request in the order
    |= = = 3 4|          of the second: three are in the pages of the first, which computes them for both
    |= = 2 3 4 5|        of the third: two are, so the first computes these for all three

    Requests with the same first page are adjacent in the order.

    Attributes:
        records: as in `Splits`, with the request's place in the order instead of its token; of the splits that each
            request computes, in that order.
        stops: [B] int32, the end of the records of the request at each place.
        members: [B, 4] int32, of the request at each place: its token, its first part, the number of splits that it
            shares with the one before it, 0 where a tile begins, and nothing.
    """

    records: torch.Tensor
    stops: torch.Tensor
    members: torch.Tensor


class Splits(msgspec.Struct, frozen=True):
    """The splits of a step's requests, request by request, and room for the result of each; tensors on the device.

    Attributes:
        num_programs: number of programs, which take the splits in turn.
        records: [n, 4] int32, of each split: its request, its number there, the request's first token, and the
            request's keys; those past the last split are meaningless.
        stops: [B] int32, the end of each request's records.
        parts: [n, tokens, num_heads, head_dim + PART_EXTRA] float32, for the most tokens that a request may have.
        shares: the splits that several requests share; None if they were not looked for.
        level: see `level_of`.
    """

    num_programs: int
    records: torch.Tensor
    stops: torch.Tensor
    parts: torch.Tensor
    shares: Shares | None = None
    level: int = LEVEL_SPLITS


def level_of(page_size: int) -> int:
    """Return after how many splits they become twice as long, over pages of so many tokens."""
    return ALL_ALIKE if page_size == SPLIT_KEYS else LEVEL_SPLITS


def count_splits(lengths: npt.ArrayLike, level: int) -> npt.NDArray[np.int64]:
    """Count the splits of contexts of these lengths; a context without a key has one that is empty."""
    if level == ALL_ALIKE:
        return np.maximum(-(-np.asarray(lengths) // SPLIT_KEYS), 1)
    return np.searchsorted(SPLIT_ENDS, lengths) + 1


def num_programs(items: int, heads: tuple[int, int, int], tokens: int, num_units: int) -> int:
    """Return how many programs take that many splits in turn; the arguments are those of `list_splits`."""
    per_unit = PROGRAMS_PER_UNIT - (tokens * heads[0] // heads[1] > DECODE_ROWS)
    return min(items * heads[1], per_unit * num_units)


def list_splits(
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    longest: np.ndarray,
    heads: tuple[int, int, int],
    num_units: int,
    tokens: int = 1,
    pages: tuple[torch.Tensor, int] | None = None,
    level: int = LEVEL_SPLITS,
) -> Splits | None:
    """List the splits of a step on the device, where lengths may change with each replay of a graph.

    Args:
        context_lens, query_starts: [B] and [B + 1] int32 on the device; see `PagedKV`.
        longest: [B] on the host, upper bounds of the context lengths.
        heads: number of query heads, number of key heads, and head size.
        num_units: number of multiprocessors of the device.
        tokens: the most tokens that a request has.
        pages: the page table and the page size, to find shared pages; None: each request reads its own.
        level: see `level_of`.

    Returns:
        The splits; None if no context is longer than one split, or if a tile cannot hold the tokens of a request.
    """
    group, count = heads[0] // heads[1], len(longest)
    if longest.max() <= SPLIT_KEYS or tokens * group > PROMPT_ROWS:
        return None
    most = int(count_splits(longest, level).sum())
    stops, own_stops, order, shared = (context_lens.new_empty(count) for _ in range(4))
    records, own_records, members = (context_lens.new_empty(size, 4) for size in (most, most, count))
    levels = SPLIT_KEYS, level, 1 if level == ALL_ALIKE else LEVELS
    options = dependent(context_lens)
    # Compiled once for all steps that graphs hold.
    width = max(MOST_CAPTURED, triton.next_power_of_2(count))
    looks = pages is not None and tokens == 1 and DECODE_ROWS // group > 1 and count > 1
    if pages is not None and looks:
        table, page_size = pages
        find_neighbours[(count,)](
            *(context_lens, table, order, shared, count, table.stride(0)),
            *(page_size, width, DECODE_ROWS // group, *levels),
            **options,
        )
    lists = stops, records, members, own_stops, own_records
    list_items[(1,)](*(context_lens, query_starts, *lists, order, shared, count, width, *levels, looks), **options)
    shares = Shares(records, stops, members) if looks else None
    parts = torch.empty(most, tokens, heads[0], heads[2] + PART_EXTRA, dtype=torch.float32, device=context_lens.device)
    return Splits(num_programs(most, heads, tokens, num_units), own_records, own_stops, parts, shares, level)
