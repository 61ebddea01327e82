"""The attention protocol: what a backend and its KV cache must do, and what every caller may rely on."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.kernels.heads import HeadNorms, RotaryTables
from tokenmill.platform.memory import zeros

if TYPE_CHECKING:
    from tokenmill.model.attention.groups import GroupedKV

Part = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of one tensor of a KV cache: [layers, pages, ...]."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of a model's attention and of its KV memory; see `AttentionLayer`.

    Attributes:
        num_layers: that have KV of their own.
        has_sinks: some layers have them.
        is_windowed: their pages are of the window group.
        others: the same of layers with heads of another shape, or of the other group, with a KV memory of their own.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_sinks: bool = False
    is_windowed: bool = False
    others: tuple[AttentionSpec, ...] = ()

    @property
    def groups(self) -> tuple[AttentionSpec, ...]:
        """Layers of one shape each, in the order of `AttentionLayer.group`."""
        return (dataclasses.replace(self, others=()), *self.others) if self.others else (self,)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """What attention is in one layer, bound once when the model is made; a backend may keep what it makes of it.

    Attributes:
        index: of the layer in the KV memory of its group.
        scale: factor on q.k before the softmax.
        window: a token attends to itself and at most `window - 1` tokens before it; None: to all before it.
        norms: of the heads of q and k; None: there are none.
        rotary: cos and sin of the positions; None: q and k are not rotated.
        sinks: a score for each head that takes its part of the softmax and has no value (gpt-oss), [num_heads] in the
            model's dtype; None: there are none.
        group: see `AttentionSpec.groups`.
        reads_only: the memory is another layer's, which has written it: the projection is q alone.
    """

    index: int
    scale: float
    window: int | None = None
    norms: HeadNorms | None = None
    rotary: RotaryTables | None = None
    sinks: torch.Tensor | None = None
    group: int = 0
    reads_only: bool = False


class KVCache(ABC):
    """The memory of keys and values, in pages; a subclass is a layout. Which page belongs to whom is not known here.

    Pages travel between caches of any layout in the canonical one: [layers, 2 (keys, values), pages, page_size,
    kv_heads, head_dim].

    Attributes:
        num_pages: page 0 among them, which takes the writes of padding and belongs to nobody.
        tensors: keys, values, and what else the layout has; each [layers, num_pages, ...], zeros at first.
    """

    def __init__(self, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: str) -> None:
        parts = self.parts(spec, num_pages, page_size, dtype)
        self.num_pages = num_pages
        self.page_size = page_size
        self.tensors = tuple(zeros(shape, kind, device) for shape, kind in parts)
        self.keys, self.values = self.tensors[:2]

    @classmethod
    @abstractmethod
    def parts(cls, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """The tensors that make up a cache."""

    @abstractmethod
    def to_canonical(self, *parts: torch.Tensor) -> torch.Tensor:
        """Pages of all tensors, [layers, n, ...] each, in the canonical layout."""

    @abstractmethod
    def from_canonical(self, data: torch.Tensor) -> Sequence[torch.Tensor]:
        """The reverse of `to_canonical`."""

    @classmethod
    def bytes_per_page(cls, spec: AttentionSpec, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of a page over all layers."""
        return sum(math.prod(shape) * kind.itemsize for shape, kind in cls.parts(spec, 1, page_size, dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def export(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of some pages in the canonical layout; what is stored as integers comes as bfloat16."""
        index = self._index(pages)
        return self.to_canonical(*(tensor.index_select(1, index) for tensor in self.tensors))

    def import_(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """Fill some pages with what `export` gave, whatever the layout and the device that it comes from."""
        index = self._index(pages)
        for tensor, part in zip(self.tensors, self.from_canonical(data.to(self.keys.device)), strict=True):
            tensor.index_copy_(1, index, part.to(tensor.dtype))

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        assert all(0 <= page < self.num_pages for page in pages), f"pages outside 0..{self.num_pages - 1}: {pages}"
        return torch.tensor(pages, dtype=torch.int64, device=self.keys.device)


class AttentionBackend(Protocol):
    """Causal attention over a paged KV cache, whose layout is the backend's own (`kv`).

    It takes the fused projection as it is, so that norms, rotation and the write into the cache can be one pass.
    """

    @property
    def kv(self) -> KVCache | GroupedKV:
        """All pages."""

    def plan(self, batch: ForwardBatch) -> Any:
        """Prepare what all layers of one step share; called once a step. The result is passed to every `forward`."""

    def forward(self, qkv: torch.Tensor, layer: AttentionLayer, plan: Any) -> torch.Tensor:
        """Norm and rotate q and k, write k and v into the cache at the batch's slots, then attend.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], or q alone, see `AttentionLayer`; contiguous; may be
                overwritten.

        Returns:
            [T, num_heads * head_dim] in the dtype of qkv.
        """
