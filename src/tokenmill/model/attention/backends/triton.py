"""Attention by this project's Triton kernels: any page size, any head size, windows; always available on a GPU."""

from __future__ import annotations

import torch

from tokenmill.model.attention.paged import PagedImplementation, Requests
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.kernels.triton.attention import PagedKV, Scores, attend_decodes, attend_prompts
from tokenmill.model.kernels.triton.splits import LEVEL_SPLITS, Splits, list_splits


class TritonPrompts(PagedImplementation):
    """A `PagedImplementation` for requests with any number of tokens.

    Args:
        are_single: requests have one token each, except for drafts, with the same result as in a longer chunk.
    """

    def __init__(self, *, are_single: bool = False) -> None:
        self._are_single = are_single

    def plan(self, requests: Requests) -> Requests:
        """Keep the requests: the kernels find their tiles themselves."""
        return requests

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: Requests,
        layer: AttentionLayer,
    ) -> None:
        """Attend by the kernel for prompts."""
        are_single = self._are_single and len(q) == len(plan.query_lens)
        own, sights = paged(memory, plan), plan.sights
        attend_prompts(q, own, output, scores_of(layer), are_single=are_single, sights=sights)


class HopperPrompts(PagedImplementation):
    """A `PagedImplementation` for prompts in half precision on capability 9.0.

    Args:
        num_units: number of multiprocessors of the device.
    """

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units

    def plan(self, requests: Requests) -> Requests:
        """Keep the requests: the kernel finds its tiles itself."""
        return requests

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: Requests,
        layer: AttentionLayer,
    ) -> None:
        """Attend by the kernel whose warps have tasks of their own."""
        from tokenmill.model.kernels.triton.hopper import attend_prompts

        attend_prompts(q, paged(memory, plan), output, scores_of(layer), self._num_units)


class TritonDecodes(PagedImplementation):
    """A `PagedImplementation` for requests with one token and drafts, whose contexts are split at fixed positions.

    Args:
        num_units: number of multiprocessors of the device.
        page_size: of the KV cache, to read pages once for requests that share them; None to not look for such pages.
        level: see `level_of`.
    """

    def __init__(
        self, spec: AttentionSpec, num_units: int, page_size: int | None = None, level: int = LEVEL_SPLITS
    ) -> None:
        self._page_size = page_size
        self._level = level
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._num_units = num_units

    def plan(self, requests: Requests) -> tuple[Requests, Splits | None]:
        """List the splits, with memory for their parts that all layers share."""
        lens, starts, most = requests.lens.context_lens, requests.lens.query_starts, int(requests.query_lens.max())
        pages = None if self._page_size is None else (requests.page_table, self._page_size)
        room = requests.context_lens, self._heads, self._num_units, most
        return requests, list_splits(lens, starts, *room, pages, self._level)

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: tuple[Requests, Splits | None],
        layer: AttentionLayer,
    ) -> None:
        """Attend by the kernel for decodes, then join the splits."""
        requests, splits = plan
        attend_decodes(q, paged(memory, requests), output, scores_of(layer), splits)


def scores_of(layer: AttentionLayer) -> Scores:
    """Return a layer's scale, window, sinks and sight for the kernels."""
    return Scores(layer.scale, layer.window, layer.sinks, layer.ahead)


def paged(memory: tuple[torch.Tensor, torch.Tensor], requests: Requests) -> PagedKV:
    """Return a layer's memory and the requests' places in it for the kernels."""
    return PagedKV(*memory, requests.page_table, requests.lens.context_lens, requests.lens.query_starts)
