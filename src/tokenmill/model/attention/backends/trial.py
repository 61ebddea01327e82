"""A trial of attention from a library on the device where it would serve: each refuses, or fails, in its own way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from subprocess import SubprocessError

import numpy as np
import torch

from tokenmill.model.attention.backends.reference import attend_sequence
from tokenmill.model.attention.batch import DeviceLens
from tokenmill.model.attention.paged import PagedImplementation, Requests
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec

# Relative to the norm of the result; half precision is off by 0.005, one key too many by far more.
TOLERANCE = 0.02
QUERY_LENS = (6, 3)
Memory = tuple[torch.Tensor, torch.Tensor]


def obstacle_of(
    name: str,
    parts: tuple[PagedImplementation, PagedImplementation | None],
    spec: AttentionSpec,
    page_size: int,
    dtype: str,
    device: str,
) -> str | None:
    """Return the reason that a library's attention cannot serve here, or None: it attends, and the result is checked.

    Two requests in mid-sequence, over pages in no order, with and without a window, and with and without sinks where
    the model has them. There are no numbers in pages behind windows that may be given up.

    Args:
        parts: for prompts, and for decodes in graphs if that is another; this one attends for a token of each request.
    """
    for part, query_lens in zip(parts, (QUERY_LENS, (1, 1)), strict=True):
        if part is None:
            continue
        requests, q, memory = _ragged(spec, page_size, dtype, device, query_lens)
        for layer in _layers(spec, page_size, q):
            own = _given_up(requests, memory, layer.window) if spec.is_windowed and layer.window else memory
            try:
                output = _attended(part, requests, q, own, layer)
            except (RuntimeError, TypeError, ValueError, AssertionError, OSError, SubprocessError) as error:
                reason = str(error).split(". ")[0] or type(error).__name__
                return f"{name} refuses pages of {page_size} tokens here: {reason}"
            want = _wanted(requests, q, memory, layer)
            if not (output - want).float().norm() <= TOLERANCE * want.float().norm():
                extras = "" if layer.sinks is None else " with sinks"
                return f"{name} is wrong over pages of {page_size} tokens{extras} here"
    return None


def _layers(spec: AttentionSpec, page_size: int, q: torch.Tensor) -> Iterator[AttentionLayer]:
    """Yield a layer with and without a window, and each with sinks if some layers of the model have them."""
    # As heavy as the keys of some pages, and not alike: sinks that are left out, or another head's, show.
    sinks = (torch.linspace(0, 3, spec.num_heads) + math.log(page_size)).to(q)
    for window, own in product((None, page_size // 2 + 2), (None, sinks) if spec.has_sinks else (None,)):
        yield AttentionLayer(0, spec.head_dim**-0.5, window, sinks=own)


def _attended(
    part: PagedImplementation, requests: Requests, q: torch.Tensor, memory: Memory, layer: AttentionLayer
) -> torch.Tensor:
    """Attend as a graph does: once before it is captured, then behind what is planned before a replay."""
    output = torch.full_like(q, torch.nan)
    part.attend(q, memory, output, part.plan(requests), layer)
    if part.before_replay(requests.context_lens):
        part.attend(q, memory, output.fill_(torch.nan), part.plan(requests), layer)
    return output


def _given_up(requests: Requests, memory: Memory, window: int) -> Memory:
    """Return the memory with NaN in all pages of requests that lie wholly behind the window."""
    keys, values = (own.clone() for own in memory)
    parts = requests.page_table, requests.context_lens.tolist(), requests.query_lens.tolist()
    for pages, context, count in zip(*parts, strict=True):
        behind = pages[: max(0, context - count + 1 - window) // keys.shape[1]].long()
        keys[behind], values[behind] = torch.nan, torch.nan
    return keys, values


def _wanted(requests: Requests, q: torch.Tensor, memory: Memory, layer: AttentionLayer) -> torch.Tensor:
    """Attend by the reference, request by request."""
    outputs = []
    parts = q.split(requests.query_lens.tolist()), requests.page_table, requests.context_lens
    for part, pages, context in zip(*parts, strict=True):
        keys, values = (own[pages.long()].flatten(0, 1)[:context].transpose(0, 1) for own in memory)
        outputs.append(attend_sequence(part, keys, values, layer))
    return torch.cat(outputs)


def _ragged(
    spec: AttentionSpec, page_size: int, dtype: str, device: str, query_lens: tuple[int, int]
) -> tuple[Requests, torch.Tensor, Memory]:
    """Make two requests in mid-sequence; their queries; and keys and values of all pages."""
    random, count = torch.Generator().manual_seed(0), sum(query_lens)
    heads, memory = (count, spec.num_heads), (2, 12, page_size, spec.num_kv_heads)
    q, kv = (
        torch.randn(*shape, spec.head_dim, generator=random).to(device, getattr(torch, dtype))
        for shape in (heads, memory)
    )
    rows = (
        [[6, 2, 7, 1, 4, 3, 8], [5, 9, 11, 10, 0, 0, 0]],
        [6 * page_size + 1, page_size + 3],
        [0, query_lens[0], count],
    )
    table, contexts, starts = (torch.tensor(row, dtype=torch.int32, device=device) for row in rows)
    lens = DeviceLens(contexts, starts)
    return Requests(slice(0, count), table, lens, np.array(query_lens), np.array(rows[1])), q, (kv[0], kv[1])
