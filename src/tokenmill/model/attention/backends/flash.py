"""Flash attention from torch (`torch.nn.attention.varlen`), over pages where the installed version supports them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from tokenmill.model.attention.backends.reference import attend_sequence
from tokenmill.model.attention.batch import DeviceLens
from tokenmill.model.attention.paged import PagedImplementation, Requests
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec

# Relative to the norm of the result; half precision is off by 0.005, one key too many by far more.
TOLERANCE = 0.02


class FlashAttention(PagedImplementation):
    """A `PagedImplementation` for prompts and decodes by torch's flash attention.

    Args:
        attention: torch's `varlen_attn_out`, see `find_flash`, or a stand-in for it in a test.
    """

    def __init__(self, spec: AttentionSpec, attention: Callable[..., Any]) -> None:
        self._spec = spec
        self._attention = attention

    def plan(self, requests: Requests) -> tuple[Requests, int, int]:
        """Keep the requests, with the longest query and context, which the library takes from the host."""
        return requests, int(requests.query_lens.max()), int(requests.context_lens.max())

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: tuple[Requests, int, int],
        layer: AttentionLayer,
    ) -> None:
        """Attend by one call of the library."""
        requests, longest_query, longest_context = plan
        self._attention(
            output,
            q,
            *memory,
            requests.lens.query_starts,
            None,
            longest_query,
            longest_context,
            scale=layer.scale,
            window_size=(-1 if layer.window is None else layer.window - 1, 0),
            enable_gqa=self._spec.num_heads != self._spec.num_kv_heads,
            seqused_k=requests.lens.context_lens,
            block_table=requests.page_table,
        )


def find_flash(library: Any = None) -> Callable[..., Any] | None:
    """Return torch's flash attention over pages, as `varlen_attn_out`; None if the installed torch has none.

    Splitting of contexts is turned off where the library has the option: split automatically, rows of pages have come
    out unwritten.

    Args:
        library: a stand-in for `torch.nn.attention.varlen` in a test.
    """
    if library is None:
        try:
            library = importlib.import_module("torch.nn.attention.varlen")
        except ImportError:
            return None
    writing = getattr(library, "varlen_attn_out", None)
    found = writing or library.varlen_attn
    parameters = inspect.signature(found).parameters
    if "block_table" not in parameters:
        return None
    whole = partial(found, num_splits=1) if "num_splits" in parameters else found
    return whole if writing else lambda output, *given, **options: output.copy_(whole(*given, **options))


def flash_obstacle(
    spec: AttentionSpec, page_size: int, dtype: str, device: str, attention: Callable[..., Any] | None = None
) -> str | None:
    """Return the reason that flash cannot serve here, or None. It calls flash on the device and checks the result.

    Args:
        attention: a stand-in for the result of `find_flash` in a test.
    """
    attention = attention or find_flash()
    if attention is None:
        return f"torch {torch.__version__} has no flash attention over pages"
    requests, q, memory = _ragged(spec, page_size, dtype, device)
    flash = FlashAttention(spec, attention)
    for window in (None, page_size // 2 + 2):
        layer, output = AttentionLayer(0, spec.head_dim**-0.5, window), torch.full_like(q, torch.nan)
        try:
            flash.attend(q, (memory[0], memory[1]), output, flash.plan(requests), layer)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            return f"flash attention refuses pages of {page_size} tokens here: {str(error).split('. ')[0]}"
        wanted = []
        for part, pages, context in zip(q.split([6, 3]), requests.page_table, requests.context_lens, strict=True):
            keys, values = memory[:, pages.long()].flatten(1, 2)[:, :context].transpose(1, 2)
            wanted.append(attend_sequence(part, keys, values, layer))
        want = torch.cat(wanted)
        if not (output - want).float().norm() <= TOLERANCE * want.float().norm():
            return f"flash attention is wrong over pages of {page_size} tokens here"
    return None


def _ragged(
    spec: AttentionSpec, page_size: int, dtype: str, device: str
) -> tuple[Requests, torch.Tensor, torch.Tensor]:
    """Make two requests in mid-sequence, of 6 and 3 tokens; their queries; and keys and values of all pages."""
    random = torch.Generator().manual_seed(0)
    heads, memory = (9, spec.num_heads), (2, 12, page_size, spec.num_kv_heads)
    q, kv = (
        torch.randn(*shape, spec.head_dim, generator=random).to(device, getattr(torch, dtype))
        for shape in (heads, memory)
    )
    rows = [[6, 2, 7, 1, 4, 3, 8], [5, 9, 11, 10, 0, 0, 0]], [6 * page_size + 1, page_size + 3], [0, 6, 9]
    table, contexts, starts = (torch.tensor(row, dtype=torch.int32, device=device) for row in rows)
    return Requests(slice(0, 9), table, DeviceLens(contexts, starts), np.array([6, 3]), np.array(rows[1])), q, kv
