"""A trial of attention from a library on the device where it would serve: each refuses, or fails, in its own way."""

from __future__ import annotations

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


def obstacle_of(
    name: str, attention: PagedImplementation, spec: AttentionSpec, page_size: int, dtype: str, device: str
) -> str | None:
    """Return the reason that attention for prompts cannot serve here, or None: it attends, and the result is checked.

    Two requests in mid-sequence, over pages in no order, with and without a window.
    """
    requests, q, memory = _ragged(spec, page_size, dtype, device)
    for window in (None, page_size // 2 + 2):
        layer, output = AttentionLayer(0, spec.head_dim**-0.5, window), torch.full_like(q, torch.nan)
        try:
            attention.attend(q, (memory[0], memory[1]), output, attention.plan(requests), layer)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, OSError, SubprocessError) as error:
            return f"{name} refuses pages of {page_size} tokens here: {str(error).split('. ')[0]}"
        wanted = []
        for part, pages, context in zip(q.split(QUERY_LENS), requests.page_table, requests.context_lens, strict=True):
            keys, values = memory[:, pages.long()].flatten(1, 2)[:, :context].transpose(1, 2)
            wanted.append(attend_sequence(part, keys, values, layer))
        want = torch.cat(wanted)
        if not (output - want).float().norm() <= TOLERANCE * want.float().norm():
            return f"{name} is wrong over pages of {page_size} tokens here"
    return None


def _ragged(
    spec: AttentionSpec, page_size: int, dtype: str, device: str
) -> tuple[Requests, torch.Tensor, torch.Tensor]:
    """Make two requests in mid-sequence; their queries; and keys and values of all pages."""
    random = torch.Generator().manual_seed(0)
    heads, memory = (9, spec.num_heads), (2, 12, page_size, spec.num_kv_heads)
    q, kv = (
        torch.randn(*shape, spec.head_dim, generator=random).to(device, getattr(torch, dtype))
        for shape in (heads, memory)
    )
    rows = [[6, 2, 7, 1, 4, 3, 8], [5, 9, 11, 10, 0, 0, 0]], [6 * page_size + 1, page_size + 3], [0, 6, 9]
    table, contexts, starts = (torch.tensor(row, dtype=torch.int32, device=device) for row in rows)
    return Requests(slice(0, 9), table, DeviceLens(contexts, starts), np.array(QUERY_LENS), np.array(rows[1])), q, kv
