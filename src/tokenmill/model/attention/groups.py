"""Attention of a model whose layers have heads of several shapes, or pages that go when they lie behind a window: one
backend, with a KV memory of its own, per group.

A page id stands for a page in the memory of each group, but for the window groups, which have ids of their own. A model
with one group has its backend alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend, AttentionLayer, KVCache

if TYPE_CHECKING:
    from tokenmill.model.attention.paged import PagedAttention


class GroupedKV:
    """What `KVCache` is to callers that know no layout, over the memories of all groups.

    Attributes:
        groups: the memory of each.
        tensors: those of all groups.
    """

    def __init__(self, groups: Sequence[KVCache]) -> None:
        self.groups = tuple(groups)
        self.num_pages, self.page_size = groups[0].num_pages, groups[0].page_size
        self.tensors = tuple(tensor for group in groups for tensor in group.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(group.num_bytes for group in self.groups)

    def export(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of n pages, [n, numbers of a page]: of each group one behind the other, in the canonical layout."""
        return torch.cat([group.export(pages).movedim(2, 0).flatten(1) for group in self.groups], 1)

    def import_(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """Fill some pages with what `export` gave, whatever the layout and the device that it comes from."""
        start = 0
        for group in self.groups:
            shape = group.export(pages[:1]).movedim(2, 0).shape[1:]
            own = data[:, start : start + shape.numel()]
            group.import_(pages, own.reshape(len(pages), *shape).movedim(0, 2))
            start += shape.numel()


class GroupedAttention:
    """A backend for each group of layers, which says by `AttentionLayer.group` whose it is.

    Attributes:
        backends: one per group.
    """

    def __init__(self, backends: Sequence[AttentionBackend], are_windowed: Sequence[bool] = ()) -> None:
        """
        Args:
            are_windowed: which of them have the pages of the window group; none: no one has.
        """
        self.backends = tuple(backends)
        self._are_windowed = tuple(are_windowed) or (False,) * len(self.backends)
        kvs = [backend.kv for backend in backends]
        assert all(isinstance(kv, KVCache) for kv in kvs), "a group has one memory"
        self.kv = GroupedKV([kv for kv in kvs if isinstance(kv, KVCache)])

    def plan(self, batch: ForwardBatch) -> tuple[Any, ...]:
        """See `AttentionBackend.plan`; what each group's backend makes of the batch."""
        batches = batch, batch.in_windows if any(self._are_windowed) else batch
        pairs = zip(self.backends, self._are_windowed, strict=True)
        return tuple(backend.plan(batches[is_windowed]) for backend, is_windowed in pairs)

    def forward(self, qkv: torch.Tensor, layer: AttentionLayer, plan: tuple[Any, ...]) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        return self.backends[layer.group].forward(qkv, layer, plan[layer.group])


class GroupedPagedAttention(GroupedAttention):
    """The same of backends for GPUs; see `PagedAttention`.

    Attributes:
        takes_drafts: all groups do.
    """

    def __init__(self, backends: Sequence[PagedAttention]) -> None:
        super().__init__(backends)
        self._paged = tuple(backends)
        self.takes_drafts = all(backend.takes_drafts for backend in backends)

    def in_graphs(self) -> GroupedPagedAttention:
        """The same memories, and what attends to them in CUDA graphs."""
        return GroupedPagedAttention([backend.in_graphs() for backend in self._paged])

    def before_replay(self, context_lens: np.ndarray) -> bool:
        """See `PagedImplementation.before_replay`: every group plans."""
        return max([backend.before_replay(context_lens) for backend in self._paged])
