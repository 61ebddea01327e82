"""Flash attention as torch has it (`torch.nn.attention.varlen`), over pages where the installed version can."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from tokenmill.attention.batch import DeviceLens
from tokenmill.attention.paged import Requests
from tokenmill.attention.protocol import AttentionLayer, AttentionSpec


class FlashAttention:
    """See `PagedImplementation`; for prompts and decodes.

    Args:
        attention: torch's `varlen_attn`, or what stands in for it in a test.
    """

    def __init__(self, spec: AttentionSpec, attention: Callable[..., Any]) -> None:
        self._spec = spec
        self._attention = attention

    def plan(self, requests: Requests) -> tuple[Requests, int, int]:
        """See `PagedImplementation.plan`: the longest query and context, which the library asks the host for."""
        return requests, int(requests.query_lens.max()), int(requests.context_lens.max())

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: tuple[Requests, int, int],
        layer: AttentionLayer,
    ) -> None:
        """See `PagedImplementation.attend`."""
        requests, longest_query, longest_context = plan
        attended = self._attention(
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
        output.copy_(attended)


def find_flash() -> Callable[..., Any] | None:
    """torch's flash attention over pages; None if the installed torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None


def flash_obstacle(spec: AttentionSpec, page_size: int, dtype: torch.dtype, device: str) -> str | None:
    """Why flash cannot serve here; None: it can. Whether it takes this page size, only a call on the device tells."""
    attention = find_flash()
    if attention is None:
        return f"torch {torch.__version__} has no flash attention over pages"
    one = torch.ones(1, dtype=torch.int32, device=device)
    q = torch.zeros(1, spec.num_heads, spec.head_dim, dtype=dtype, device=device)
    memory = torch.zeros(1, page_size, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device)
    lens = DeviceLens(one, torch.arange(2, dtype=torch.int32, device=device))
    single = Requests(slice(0, 1), torch.zeros_like(one)[None], lens, one.cpu().numpy(), one.cpu().numpy())
    try:
        flash = FlashAttention(spec, attention)
        flash.attend(q, (memory, memory), torch.empty_like(q), flash.plan(single), AttentionLayer(0, 1.0))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return f"flash attention refuses pages of {page_size} tokens here: {str(error).split('. ')[0]}"
    return None
