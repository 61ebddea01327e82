"""Attention for layers with heads of several shapes, of which some see whole images, or with pages that are freed
behind a window: one backend per group, with its own KV memory.

A page id stands for a page in the memory of each group, except for the window groups, which have ids of their own. A
model with one group has its backend alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import (
    AttentionBackend,
    AttentionLayer,
    AttentionSpec,
    GroupedKV,
    KVCache,
)

if TYPE_CHECKING:
    from tokenmill.model.attention.paged import PagedAttention
    from tokenmill.platform.arrays import AnyArray


class GroupedAttention:
    """A backend for each group of layers, chosen by `AttentionLayer.group`.

    Attributes:
        backends: one per group. specs: of the groups.
        are_windowed: True for each with pages of the window group.
    """

    def __init__(self, backends: Sequence[AttentionBackend], specs: Sequence[AttentionSpec]) -> None:
        self.backends = tuple(backends)
        self.specs = tuple(specs)
        self.are_windowed = tuple(spec.is_windowed for spec in specs)
        kvs = [backend.kv for backend in backends]
        assert all(isinstance(kv, KVCache) for kv in kvs), "a group has one memory"
        self.kv = GroupedKV([kv for kv in kvs if isinstance(kv, KVCache)])

    def plan(self, batch: ForwardBatch) -> tuple[Any, ...]:
        """Return the plan of each group's backend for the batch."""
        batches = batch, batch.in_windows if any(self.are_windowed) else batch
        pairs = zip(self.backends, self.specs, strict=True)
        return tuple(backend.plan(_as_seen(batches[spec.is_windowed], spec)) for backend, spec in pairs)

    def forward(self, qkv: AnyArray, layer: AttentionLayer, plan: tuple[Any, ...]) -> AnyArray:
        """Attend with the backend of the layer's group."""
        return self.backends[layer.group].forward(qkv, layer, plan[layer.group])


def _as_seen(batch: ForwardBatch, spec: AttentionSpec) -> ForwardBatch:
    """Return the batch for layers of a group: the tokens of an image see each other in some, and in others not."""
    if spec.spans_see_ahead or batch.media is None or batch.media.sights is None:
        return batch
    return msgspec.structs.replace(batch, media=msgspec.structs.replace(batch.media, sights=None))


class GroupedPagedAttention(GroupedAttention):
    """A `PagedAttention` for each group of layers, on GPUs.

    Attributes:
        takes_drafts: True if all groups take drafts.
    """

    def __init__(self, backends: Sequence[PagedAttention], specs: Sequence[AttentionSpec]) -> None:
        super().__init__(backends, specs)
        self._paged = tuple(backends)
        self.takes_drafts = all(backend.takes_drafts for backend in backends)

    def in_graphs(self) -> GroupedPagedAttention:
        """Return a backend over the same memories that attends as in CUDA graphs."""
        return GroupedPagedAttention([backend.in_graphs() for backend in self._paged], self.specs)

    def before_replay(self, context_lens: np.ndarray) -> bool:
        """Plan every group before a replay."""
        return max([backend.before_replay(context_lens) for backend in self._paged])
