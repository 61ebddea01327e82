"""Attention for layers with heads of several shapes, or with pages that are freed behind a window: one backend per
group, with its own KV memory.

A page id stands for a page in the memory of each group, except for the window groups, which have ids of their own. A
model with one group has its backend alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend, AttentionLayer, GroupedKV, KVCache

if TYPE_CHECKING:
    from tokenmill.model.attention.paged import PagedAttention
    from tokenmill.platform.arrays import AnyArray


class GroupedAttention:
    """A backend for each group of layers, chosen by `AttentionLayer.group`.

    Attributes:
        backends: one per group. are_windowed: True for each with pages of the window group.
    """

    def __init__(self, backends: Sequence[AttentionBackend], are_windowed: Sequence[bool] = ()) -> None:
        """Join the backends and their KV memories.

        Args:
            are_windowed: True for each group with pages of the window group; empty if no group has them.
        """
        self.backends = tuple(backends)
        self.are_windowed = tuple(are_windowed) or (False,) * len(self.backends)
        kvs = [backend.kv for backend in backends]
        assert all(isinstance(kv, KVCache) for kv in kvs), "a group has one memory"
        self.kv = GroupedKV([kv for kv in kvs if isinstance(kv, KVCache)])

    def plan(self, batch: ForwardBatch) -> tuple[Any, ...]:
        """Return the plan of each group's backend for the batch."""
        batches = batch, batch.in_windows if any(self.are_windowed) else batch
        pairs = zip(self.backends, self.are_windowed, strict=True)
        return tuple(backend.plan(batches[is_windowed]) for backend, is_windowed in pairs)

    def forward(self, qkv: AnyArray, layer: AttentionLayer, plan: tuple[Any, ...]) -> AnyArray:
        """Attend with the backend of the layer's group."""
        return self.backends[layer.group].forward(qkv, layer, plan[layer.group])


class GroupedPagedAttention(GroupedAttention):
    """A `PagedAttention` for each group of layers, on GPUs.

    Attributes:
        takes_drafts: True if all groups take drafts.
    """

    def __init__(self, backends: Sequence[PagedAttention], are_windowed: Sequence[bool] = ()) -> None:
        super().__init__(backends, are_windowed)
        self._paged = tuple(backends)
        self.takes_drafts = all(backend.takes_drafts for backend in backends)

    def in_graphs(self) -> GroupedPagedAttention:
        """Return a backend over the same memories that attends as in CUDA graphs."""
        return GroupedPagedAttention([backend.in_graphs() for backend in self._paged], self.are_windowed)

    def before_replay(self, context_lens: np.ndarray) -> bool:
        """Plan every group before a replay."""
        return max([backend.before_replay(context_lens) for backend in self._paged])
