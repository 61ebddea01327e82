"""Gather the inputs of a decode step from the tables of the rows: one launch where torch makes a dozen.

Estimate, not measured: for 256 rows of 515 pages 1.1 MB are read and written, a quarter of a microsecond on an H200, so
it takes as long as a launch (1 to 2 us), and so did each of the twelve; a row is some 40 instructions and its pages.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_WIDTH = 1024


@triton.jit
def _decode_inputs(
    rows, ends, stride, pages, tokens, num_pages, places, lens, page_table, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Gather the inputs of a row: one program per row and `WIDTH` of its pages; the first also writes the scalars."""
    index = tl.program_id(0)
    row, end = tl.load(rows + index * stride), tl.load(ends + index * stride)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    own = tl.load(pages + row * num_pages + column, (column < num_pages) & (column * PAGE_SIZE < end), 0)
    tl.store(page_table + index * num_pages + column, own, column < num_pages)
    if tl.program_id(1) == 0:
        position = end - 1
        page = tl.load(pages + row * num_pages + position // PAGE_SIZE).to(tl.int64)
        token_id = tl.load(tokens + row * num_pages * PAGE_SIZE + position)
        tl.store(places + index, token_id.to(tl.int64))
        tl.store(places + tl.num_programs(0) + index, position)
        tl.store(places + 2 * tl.num_programs(0) + index, page * PAGE_SIZE + position % PAGE_SIZE)
        tl.store(lens + index, end.to(tl.int32))


@triton.jit
def _window_inputs(
    rows, ends, stride, pages, num_pages, reach, slots, page_table, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Gather the pages of a row that its tokens reach: one program per row and `WIDTH` of them."""
    index = tl.program_id(0)
    row, end = tl.load(rows + index * stride), tl.load(ends + index * stride)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_seen = (column * PAGE_SIZE < end) & ((column + 1) * PAGE_SIZE > end - reach)
    own = tl.load(pages + row * num_pages + column, (column < num_pages) & is_seen, 0)
    tl.store(page_table + index * num_pages + column, own, column < num_pages)
    if tl.program_id(1) == 0:
        page = tl.load(pages + row * num_pages + (end - 1) // PAGE_SIZE).to(tl.int64)
        tl.store(slots + index, page * PAGE_SIZE + (end - 1) % PAGE_SIZE)


def window_inputs(
    rows: torch.Tensor, ends: torch.Tensor, pages: torch.Tensor, page_size: int, reach: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather slots [n] int64 and the page table [n, P] int32 of n rows in the window group.

    Args:
        rows, ends, pages: as `decode_inputs` takes them, of this group. reach: positions before its end that a row's
            tokens attend to; pages behind these are gone, and 0 in the table.
    """
    n, num_pages = len(rows), pages.shape[1]
    slots, page_table = torch.empty(n, dtype=torch.int64, device=pages.device), pages.new_empty(n, num_pages)
    width = min(_WIDTH, triton.next_power_of_2(num_pages))
    _window_inputs[(n, triton.cdiv(num_pages, width))](
        *(rows, ends, rows.stride(0), pages, num_pages, reach, slots, page_table), PAGE_SIZE=page_size, WIDTH=width
    )
    return slots, page_table


def decode_inputs(
    rows: torch.Tensor, ends: torch.Tensor, pages: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gather the inputs of n rows whose last token is in the table and not yet computed.

    Args:
        rows, ends: [n] int64, with one stride; each row's number, and where its token to be sampled will stand (>= 1).
        pages, tokens: the tables, [R, P] and [R, P * page_size] int32 contiguous.

    Returns:
        Token ids, positions and slots [3, n] int64; context lengths [n] int32; the page table [n, P] int32, 0 past a
        row's last page.
    """
    n, num_pages = len(rows), pages.shape[1]
    places = torch.empty(3, n, dtype=torch.int64, device=pages.device)
    lens, page_table = pages.new_empty(n), pages.new_empty(n, num_pages)
    width, page_size = min(_WIDTH, triton.next_power_of_2(num_pages)), tokens.shape[1] // num_pages
    _decode_inputs[(n, triton.cdiv(num_pages, width))](
        rows, ends, rows.stride(0), pages, tokens, num_pages, places, lens, page_table, PAGE_SIZE=page_size, WIDTH=width
    )
    return places, lens, page_table
