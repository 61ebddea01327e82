"""Attention by this project's own Triton kernels: any page size, any head size, windows; always there on a GPU."""

from __future__ import annotations

import torch

from tokenmill.attention.paged import Requests
from tokenmill.attention.protocol import AttentionSpec
from tokenmill.kernels.triton.attention import TILE_KEYS, PagedKV, attend_decodes, attend_prompts

MOST_SPLITS = 64


class TritonPrompts:
    """See `Attender`; for requests with any number of tokens."""

    name = "triton"
    is_capturable = True

    def __init__(self, spec: AttentionSpec) -> None:
        self._scale = spec.scale

    def plan(self, requests: Requests) -> Requests:
        """See `Attender.plan`: the kernels find their tiles themselves."""
        return requests

    def attend(
        self,
        q: torch.Tensor,
        layer: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: Requests,
        window: int | None,
    ) -> None:
        """See `Attender.attend`."""
        attend_prompts(q, paged(layer, plan), output, self._scale, window)


class TritonDecodes:
    """See `Attender`; for requests with one token, whose contexts are split until the device is full.

    Args:
        num_units: programs that run side by side on the device.
    """

    name = "triton"
    is_capturable = True

    def __init__(self, spec: AttentionSpec, num_units: int) -> None:
        self._scale = spec.scale
        self._num_kv_heads = spec.num_kv_heads
        self._num_units = num_units

    def plan(self, requests: Requests) -> tuple[Requests, int]:
        """See `Attender.plan`: the number of splits."""
        programs = len(requests.held) * self._num_kv_heads
        # Two programs for each unit hide each other's waits; a split shorter than a tile is empty.
        wanted = min(2 * self._num_units // programs, MOST_SPLITS, -(-int(requests.held.max()) // TILE_KEYS))
        return requests, 1 << max(0, wanted.bit_length() - 1)

    def attend(
        self,
        q: torch.Tensor,
        layer: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: tuple[Requests, int],
        window: int | None,
    ) -> None:
        """See `Attender.attend`."""
        requests, splits = plan
        attend_decodes(q, paged(layer, requests), output, self._scale, window, splits)


def paged(layer: tuple[torch.Tensor, torch.Tensor], requests: Requests) -> PagedKV:
    """What the kernels take."""
    return PagedKV(*layer, requests.page_table, requests.context_lens, requests.query_starts)
