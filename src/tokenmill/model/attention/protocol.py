"""The attention protocol: the duties of a backend and its KV cache, and the guarantees to every caller."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from tokenmill.model.kernels.heads import HeadNorms, RotaryTables

if TYPE_CHECKING:
    import torch

    from tokenmill.model.attention.batch import ForwardBatch
    from tokenmill.platform.arrays import Array

Part: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"
"""Shape and dtype of one tensor of a KV cache: [layers, pages, ...]."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of a model's attention and of its KV memory; see `AttentionLayer`.

    Attributes:
        num_layers: number of layers with KV of their own.
        has_sinks: True if some layers have sinks.
        is_windowed: True if their pages are of the window group.
        others: specs of layers with heads of another shape, or of the other group, with a KV memory of their own.
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
        """Specs of layers of one shape each, in the order of `AttentionLayer.group`."""
        return (dataclasses.replace(self, others=()), *self.others) if self.others else (self,)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionLayer:
    """The attention of one layer, bound once when the model is made; a backend may cache what it derives from it.

    Attributes:
        index: index of the layer in the KV memory of its group.
        scale: factor on q.k before the softmax.
        window: a token attends to itself and at most `window - 1` tokens before it; None for all tokens before it.
        norms: norms of the heads of q and k; None for no norms.
        rotary: cos and sin of the positions; None for no rotation of q and k.
        sinks: a score per head that takes part in the softmax but has no value (gpt-oss), [num_heads] in the model's
            dtype; None for no sinks.
        group: index of the layer's group, see `AttentionSpec.groups`.
        reads_only: the memory is another layer's, which has written it: the projection is q alone.
    """

    index: int
    scale: float
    window: int | None = None
    norms: HeadNorms | None = None
    rotary: RotaryTables | None = None
    sinks: Array | None = None
    group: int = 0
    reads_only: bool = False


class KVCache(ABC):
    """The memory of keys and values, in pages; each subclass is a layout. It does not know the owners of its pages.

    Pages travel between caches of any layout in the canonical one: [layers, 2 (keys, values), pages, page_size,
    kv_heads, head_dim].

    Attributes:
        num_pages: number of pages, including page 0, which takes the writes of padding and has no owner.
        tensors: keys, values, and further tensors of the layout; each [layers, num_pages, ...], zeros at first.
    """

    def __init__(self, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: str) -> None:
        from tokenmill.platform.tensor_memory import zeros  # until the cut

        parts = self.parts(spec, num_pages, page_size, dtype)
        self.num_pages = num_pages
        self.page_size = page_size
        self.tensors = tuple(zeros(shape, kind, device) for shape, kind in parts)
        self.keys, self.values = self.tensors[:2]

    @classmethod
    @abstractmethod
    def parts(cls, spec: AttentionSpec, num_pages: int, page_size: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return the shapes and dtypes of the tensors that make up a cache."""

    @abstractmethod
    def to_canonical(self, *parts: torch.Tensor) -> torch.Tensor:
        """Convert pages of all tensors, [layers, n, ...] each, to the canonical layout."""

    @abstractmethod
    def from_canonical(self, data: torch.Tensor) -> Sequence[torch.Tensor]:
        """Convert pages in the canonical layout to those of all tensors."""

    @classmethod
    def bytes_per_page(cls, spec: AttentionSpec, page_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of a page over all layers."""
        return sum(math.prod(shape) * kind.itemsize for shape, kind in cls.parts(spec, 1, page_size, dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def export(self, pages: Sequence[int]) -> torch.Tensor:
        """Return a copy of some pages in the canonical layout; integers are converted to bfloat16."""
        index = self._index(pages)
        return self.to_canonical(*(tensor.index_select(1, index) for tensor in self.tensors))

    def import_(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """Fill some pages with the result of an `export`, from any layout and device."""
        index = self._index(pages)
        for tensor, part in zip(self.tensors, self.from_canonical(data.to(self.keys.device)), strict=True):
            tensor.index_copy_(1, index, part.to(tensor.dtype))

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        assert all(0 <= page < self.num_pages for page in pages), f"pages outside 0..{self.num_pages - 1}: {pages}"
        import torch  # until the cut

        return torch.tensor(pages, dtype=torch.int64, device=self.keys.device)


class GroupedKV:
    """The KV memories of all groups, with the part of `KVCache` for callers that do not know layouts.

    Attributes:
        groups: the memory of each group.
        tensors: the tensors of all groups.
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
        """Return a copy of n pages, [n, numbers of a page]: the groups one after the other, in the canonical layout."""
        import torch  # until the cut

        return torch.cat([group.export(pages).movedim(2, 0).flatten(1) for group in self.groups], 1)

    def import_(self, pages: Sequence[int], data: torch.Tensor) -> None:
        """Fill some pages with the result of an `export`, from any layout and device."""
        start = 0
        for group in self.groups:
            shape = group.export(pages[:1]).movedim(2, 0).shape[1:]
            own = data[:, start : start + shape.numel()]
            group.import_(pages, own.reshape(len(pages), *shape).movedim(0, 2))
            start += shape.numel()


class AttentionBackend(Protocol):
    """Causal attention over a paged KV cache, whose layout is the backend's own (`kv`).

    It takes the fused projection as it is, so that norms, rotation and the write into the cache can be one pass.
    """

    @property
    def kv(self) -> KVCache | GroupedKV:
        """The KV cache with all pages."""

    def plan(self, batch: ForwardBatch) -> Any:
        """Prepare the data shared by all layers of a step; called once a step. Every `forward` takes the result."""

    def forward(self, qkv: torch.Tensor, layer: AttentionLayer, plan: Any) -> torch.Tensor:
        """Norm and rotate q and k, write k and v into the cache at the batch's slots, then attend.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], or q alone, see `AttentionLayer`; contiguous; may be
                overwritten.

        Returns:
            [T, num_heads * head_dim] in the dtype of qkv.
        """
