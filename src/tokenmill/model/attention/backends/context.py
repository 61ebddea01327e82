"""Attention over pages on several devices: decodes split by split where their pages are, prompts over gathered pages.

    decodes   each rank attends the splits that lie with it ── gather parts ── join all, in their order
    prompts   each rank shows its pages of a layer ── gather ── attends chunks of the rows ── gather outputs

Sums keep their order: a split is a page, so it is whole on one device, and the join takes the parts of a request as one
device would; a row of a prompt passes the same tiles of keys. So the bits are those of one device. Decodes send a
hundredth of the bytes that they read (in half precision, 2 to 3 query heads to a key head); prompts bring all keys and
values that they attend to, once a layer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenmill.model.attention.backends.triton import scores_of
from tokenmill.model.attention.context_step import OwnDecodes, OwnPrompts
from tokenmill.model.attention.paged import PagedImplementation, Requests
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.kernels.triton.attention import PagedKV, attend_prompts, attend_splits, join
from tokenmill.model.kernels.triton.splits import ALL_ALIKE, PART_EXTRA, Splits, num_programs

Gather = Callable[[torch.Tensor], torch.Tensor]
"""This rank's tensor -> those of all ranks, [ranks, *shape]."""


class SharedDecodes(PagedImplementation):
    """A `PagedImplementation` for decodes of contexts over several devices.

    Args:
        num_units: number of multiprocessors of the device.
    """

    takes_drafts = False

    def __init__(self, spec: AttentionSpec, num_units: int, gather: Gather) -> None:
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._num_units = num_units
        self._gather = gather

    def plan(self, requests: Requests) -> tuple[OwnDecodes, Splits, torch.Tensor]:
        """Take this rank's splits, with memory for their parts that all layers share."""
        assert requests.context is not None and requests.context.decodes is not None, "listed on the host"
        own, (heads, _, head_dim) = requests.context.decodes, self._heads
        room = len(own.records)
        parts = torch.empty(room, 1, heads, head_dim + PART_EXTRA, dtype=torch.float32, device=own.records.device)
        count = num_programs(room, self._heads, 1, self._num_units)
        splits = Splits(count, own.records, own.stops, parts, level=ALL_ALIKE)
        return own, splits, requests.lens.query_starts

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: tuple[OwnDecodes, Splits, torch.Tensor],
        layer: AttentionLayer,
    ) -> None:
        """Attend over this rank's pages, then join the parts of all ranks."""
        own, splits, query_starts = plan
        scores = scores_of(layer)
        attend_splits(q, PagedKV(*memory, own.page_table, own.lens, query_starts), splits, scores)
        every = self._gather(splits.parts).flatten(0, 1)
        join(every.index_select(0, own.order), own.all_stops, query_starts, output, scores.sinks)


class SharedPrompts(PagedImplementation):
    """A `PagedImplementation` for requests with any number of tokens, whose contexts lie on several devices."""

    takes_drafts = False

    def __init__(self, gather: Gather) -> None:
        self._gather = gather

    def plan(self, requests: Requests) -> OwnPrompts:
        """Take what the host has listed."""
        assert requests.context is not None and requests.context.prompts is not None, "listed on the host"
        return requests.context.prompts

    def attend(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        plan: OwnPrompts,
        layer: AttentionLayer,
    ) -> None:
        """Bring together a layer's pages, then attend for this rank's rows, or for all where they are few."""
        keys, values = (self._gather(part.index_select(0, plan.pages)).flatten(0, 1) for part in memory)
        kv = PagedKV(keys, values, plan.page_table, plan.lens, plan.starts)
        if not plan.are_shared:
            attend_prompts(q, kv, output, scores_of(layer))
            return
        own = torch.empty(len(plan.rows), *output.shape[1:], dtype=output.dtype, device=output.device)
        attend_prompts(q.index_select(0, plan.rows), kv, own, scores_of(layer))
        torch.index_select(self._gather(own).flatten(0, 1), 0, plan.order, out=output)
