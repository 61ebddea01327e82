"""Flash attention from torch (`torch.nn.attention.varlen`), over pages where the installed version supports them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tokenmill.model.attention.backends.trial import obstacle_of
from tokenmill.model.attention.paged import PagedImplementation, Requests
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec


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
    return obstacle_of("flash attention", (FlashAttention(spec, attention), None), spec, page_size, dtype, device)
