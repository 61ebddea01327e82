"""The attention protocol: the duties of a backend and its KV cache, and the guarantees to every caller."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.platform.arrays import ArrayLibrary, itemsize

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

    from tokenmill.model.kernels.heads import HeadNorms, RotaryTables
    from tokenmill.platform.arrays import AnyArray

Part = tuple[tuple[int, ...], str]
"""Shape and dtype of one array of a KV cache: [layers, pages, ...]."""
Take: TypeAlias = "Callable[[int], npt.NDArray[np.uint8]]"
"""Takes so many bytes of zeroed memory, which other processes may map too."""


class AttentionSpec(msgspec.Struct, frozen=True):
    """The shape of a model's attention and of its KV memory; see `AttentionLayer`.

    Attributes:
        num_layers: number of layers with KV of their own.
        has_sinks: True if some layers have sinks.
        is_windowed: True if their pages are of the window group.
        sees_ahead: True if tokens attend to some after them, in some layer.
        spans_see_ahead: True if those of one image do; see `MediaTokens.sights`.
        others: specs of layers with heads of another shape, other sights, or of the other group, with a KV memory of
            their own.
        has_clips: True if keys and values of clips are stored beside those of the text; see `ClipAttention`.
        has_alibi: True if some layers have slopes.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_sinks: bool = False
    is_windowed: bool = False
    others: tuple[AttentionSpec, ...] = ()
    sees_ahead: bool = False
    spans_see_ahead: bool = False
    has_clips: bool = False
    has_alibi: bool = False

    @property
    def groups(self) -> tuple[AttentionSpec, ...]:
        """Specs of layers of one shape each, in the order of `AttentionLayer.group`."""
        return (msgspec.structs.replace(self, others=()), *self.others) if self.others else (self,)


class AttentionLayer(msgspec.Struct, frozen=True, eq=False):
    """The attention of one layer, bound once when the model is made; a backend may cache what it derives from it.

    Attributes:
        index: index of the layer in the KV memory of its group.
        scale: factor on q.k before the softmax.
        window: a token attends to itself and at most `window - 1` tokens before it; None for all tokens before it.
        ahead: and to at most so many tokens after it, all of which are in the step; None for all of its request.
        norms: norms of the heads of q and k; None for no norms.
        rotary: cos and sin of the positions; None for no rotation of q and k.
        sinks: a score per head that takes part in the softmax but has no value (gpt-oss), [num_heads] in the model's
            dtype; None for no sinks.
        group: index of the layer's group, see `AttentionSpec.groups`.
        reads_only: the memory is another layer's, which has written it: the projection is q alone.
        first_key: no token attends to what lies before this position, and none lies there.
        slopes: for each head, the number that a score falls by with each token between query and key, before or after
            (ALiBi: Press et al. 2021); None for none. Such a layer sees whole requests, see `ahead`.
    """

    index: int
    scale: float
    window: int | None = None
    norms: HeadNorms | None = None
    rotary: RotaryTables | None = None
    sinks: AnyArray | None = None
    group: int = 0
    reads_only: bool = False
    first_key: int = 0
    ahead: int | None = 0
    slopes: tuple[float, ...] | None = None


class KVCache(ABC):
    """The memory of keys and values, in pages; each subclass is a layout. It does not know the owners of its pages.

    |layer 0: page 0, page 1 ...|layer 1: page 0, page 1 ...| ... of each array       layer-first
    |page 0: all layers of all arrays|page 1: all layers of all arrays| ...           page-first

    Attributes:
        num_pages: number of pages, including page 0, which takes the writes of padding and has no owner.
        tensors: keys, values, and further arrays of the layout; each [layers, num_pages, ...], zeros at first. A page
            of a layer is one piece.
        pieces: the same memory as arrays in one piece each, [n, num_pages, ...]: n = layers, or 1 of page-first KV. A
            page's bytes have one order in both: array by array, layer by layer.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        num_pages: int,
        page_size: int,
        dtype: str,
        device: str,
        *,
        is_page_first: bool = False,
        take: Take | None = None,
        arrays: ArrayLibrary | None = None,
    ) -> None:
        """`take`: takes its memory, zeros, from other processes; `arrays`: the library instead of the device's."""
        parts, arrays = self.parts(spec, num_pages, page_size, dtype), arrays or self.arrays_of(device)
        self.num_pages = num_pages
        self.page_size = page_size
        self.tensors: tuple[AnyArray, ...]
        self.pieces: tuple[AnyArray, ...]
        if is_page_first:
            piece = (1, num_pages, self.bytes_per_page(spec, page_size, dtype)), "uint8"
            self.pieces = (_zeros(arrays, *piece, take),)
            self.tensors = tuple(_page_first(self.pieces[0][0], parts, arrays))
        else:
            self.tensors = self.pieces = tuple(_zeros(arrays, *part, take) for part in parts)
        self.keys, self.values = self.tensors[:2]

    @classmethod
    @abstractmethod
    def parts(cls, spec: AttentionSpec, num_pages: int, page_size: int, dtype: str) -> tuple[Part, ...]:
        """Return the shapes and dtypes of the arrays that make up a cache."""

    @classmethod
    @abstractmethod
    def arrays_of(cls, device: str) -> ArrayLibrary:
        """Return the library of its arrays on a device."""

    @classmethod
    def bytes_per_page(cls, spec: AttentionSpec, page_size: int, dtype: str) -> int:
        """Return the bytes of a page over all layers."""
        return sum(math.prod(shape) * itemsize(kind) for shape, kind in cls.parts(spec, 1, page_size, dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(tensor.nbytes for tensor in self.tensors)


def _zeros(arrays: ArrayLibrary, shape: tuple[int, ...], dtype: str, take: Take | None) -> AnyArray:
    if take is None:
        return arrays.zeros(shape, dtype)
    return arrays.over(take(math.prod(shape) * itemsize(dtype)), arrays.empty((0,), dtype)).reshape(shape)


def _page_first(memory: AnyArray, parts: Sequence[Part], arrays: ArrayLibrary) -> Iterator[AnyArray]:
    """Yield the arrays of a cache, [layers, pages, ...] each, as views of bytes [pages, bytes of a page]."""
    start = 0
    for (layers, pages, *shape), kind in parts:
        end = start + layers * math.prod(shape) * itemsize(kind)
        own = memory[:, start:end].view(arrays.empty((0,), kind).dtype)
        yield own.reshape(pages, layers, *shape).swapaxes(0, 1)
        start = end


class GroupedKV:
    """The KV memories of all groups, with the part of `KVCache` for callers that do not know layouts.

    Attributes:
        groups: the memory of each group.
        tensors, pieces: the arrays of all groups.
    """

    def __init__(self, groups: Sequence[KVCache]) -> None:
        self.groups = tuple(groups)
        self.num_pages, self.page_size = groups[0].num_pages, groups[0].page_size
        self.tensors = tuple(tensor for group in groups for tensor in group.tensors)
        self.pieces = tuple(piece for group in groups for piece in group.pieces)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(group.num_bytes for group in self.groups)


class AttentionBackend(Protocol):
    """Attention over a paged KV cache, causal unless a layer says more, whose layout is the backend's own (`kv`).

    It takes the fused projection as it is, so that norms, rotation and the write into the cache can be one pass. A pass
    that goes layer by layer is computed in torch; one native call goes its own way, see `NativeAttention`.
    """

    @property
    def kv(self) -> KVCache | GroupedKV:
        """The KV cache with all pages."""

    def plan(self, batch: ForwardBatch) -> Any:
        """Prepare the data shared by all layers of a step; called once a step. Every `forward` takes the result."""

    def forward(self, qkv: AnyArray, layer: AttentionLayer, plan: Any) -> AnyArray:
        """Norm and rotate q and k, write k and v into the cache at the batch's slots, then attend.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], or q alone, see `AttentionLayer`; contiguous; may be
                overwritten.

        Returns:
            [T, num_heads * head_dim] in the dtype of qkv.
        """


class ClipAttention(AttentionBackend, Protocol):
    """Attention over a cache that also holds the keys and values of clips, which attend to nothing."""

    def store(self, k: AnyArray, v: AnyArray, layer: AttentionLayer, slots: AnyArray) -> None:
        """Write k and v, [T, num_kv_heads, head_dim], into the cache at slots [T] int64."""
