"""Attention by this project's own Triton kernels: any page size, any head size, windows; always there on a GPU."""

from __future__ import annotations

import torch

from tokenmill.attention.paged import Requests
from tokenmill.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.kernels.triton.attention import TILE_KEYS, PagedKV, attend_decodes, attend_prompts

MOST_SPLITS = 64


class TritonPrompts:
    """See `PagedImplementation`; for requests with any number of tokens."""

    def plan(self, requests: Requests) -> Requests:
        """See `PagedImplementation.plan`: the kernels find their tiles themselves."""
        return requests

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: Requests,
        layer: AttentionLayer,
    ) -> None:
        """See `PagedImplementation.attend`."""
        attend_prompts(q, paged(memory, plan), output, layer.scale, layer.window)


class TritonDecodes:
    """See `PagedImplementation`; for requests with one token, whose contexts are split until the device is full.

    Args:
        num_units: programs that run side by side on the device.
    """

    def __init__(self, spec: AttentionSpec, num_units: int) -> None:
        self._num_kv_heads = spec.num_kv_heads
        self._num_units = num_units

    def plan(self, requests: Requests) -> tuple[Requests, int]:
        """See `PagedImplementation.plan`: the number of splits."""
        programs = len(requests.context_lens) * self._num_kv_heads
        # Two programs for each unit hide each other's waits; a split shorter than a tile is empty.
        wanted = min(2 * self._num_units // programs, MOST_SPLITS, -(-int(requests.context_lens.max()) // TILE_KEYS))
        return requests, 1 << max(0, wanted.bit_length() - 1)

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: tuple[Requests, int],
        layer: AttentionLayer,
    ) -> None:
        """See `PagedImplementation.attend`."""
        requests, splits = plan
        attend_decodes(q, paged(memory, requests), output, layer.scale, layer.window, splits)


def paged(memory: tuple[torch.Tensor, torch.Tensor], requests: Requests) -> PagedKV:
    """What the kernels take."""
    return PagedKV(*memory, requests.page_table, requests.lens.context_lens, requests.lens.query_starts)
