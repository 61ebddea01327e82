"""KV pages in one layout that all caches can be turned into: [layers, 2 (keys, values), pages, page_size, kv_heads,
head_dim]. Pages of several groups are rows of numbers, the groups one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.model.attention.kv_codes import decoded, encoded, packed, rotated, unpacked
from tokenmill.model.attention.packed_kv import SUBPAGE, PackedKV
from tokenmill.model.attention.protocol import GroupedKV, KVCache
from tokenmill.model.attention.tensor_kv import HeadMajorKV
from tokenmill.model.kernels.stored_tensors import tensor_over

LARGEST_INT8 = 127.0


def tensors_of(kv: KVCache | GroupedKV) -> list[torch.Tensor]:
    """Tensors over the memory of a cache, of any layout."""
    return [tensor_over(memory) for memory in kv.tensors]


def export(kv: KVCache | GroupedKV, pages: Sequence[int]) -> torch.Tensor:
    """A copy of some pages; integers are turned into bfloat16."""
    if isinstance(kv, GroupedKV):
        return torch.cat([export(group, pages).movedim(2, 0).flatten(1) for group in kv.groups], 1)
    return to_canonical(kv, *(tensor.index_select(1, _index(kv, pages)) for tensor in tensors_of(kv)))


def import_(kv: KVCache | GroupedKV, pages: Sequence[int], data: torch.Tensor) -> None:
    """Fill some pages with the result of an `export`, from any layout and device."""
    if isinstance(kv, KVCache):
        tensors = tensors_of(kv)
        for tensor, part in zip(tensors, from_canonical(kv, data.to(tensors[0].device)), strict=True):
            tensor.index_copy_(1, _index(kv, pages), part.to(tensor.dtype))
        return
    start = 0
    for group in kv.groups:
        shape = export(group, pages[:1]).movedim(2, 0).shape[1:]
        own = data[:, start : start + shape.numel()]
        import_(group, pages, own.reshape(len(pages), *shape).movedim(0, 2))
        start += shape.numel()


def to_canonical(kv: KVCache, *parts: torch.Tensor) -> torch.Tensor:
    """Pages of all tensors, [layers, n, ...] each, in the canonical layout."""
    if parts[0].dtype == torch.uint8:
        codes = unpacked(*parts[:2])
        heads = [decoded(own, scales) for own, scales in zip(codes, parts[2:], strict=True)]
        return torch.stack(heads, 1).transpose(3, 4).to(torch.bfloat16)
    if not isinstance(kv, PackedKV):
        both = torch.stack(parts, 1)
        return both.transpose(3, 4).contiguous() if isinstance(kv, HeadMajorKV) else both
    if kv.page_size % SUBPAGE:
        both = torch.stack(list(parts[:2]), 1).transpose(3, 4).contiguous()
    else:
        # [layers, pages, heads, sub-pages, dims / 2, 16, 2] and [layers, pages, heads, sub-pages, 8, dims, 2]
        keys = parts[0].permute(0, 1, 3, 5, 2, 4, 6).flatten(5, 6).flatten(2, 3)
        values = parts[1].permute(0, 1, 3, 4, 6, 2, 5).flatten(2, 4)
        both = torch.stack((keys, values), 1)
    if len(parts) == 2:
        return both
    scales = torch.stack(parts[2:], 1).transpose(3, 4)
    return rotated(both * scales.unsqueeze(-1)).to(torch.bfloat16)


def from_canonical(kv: KVCache, data: torch.Tensor) -> Sequence[torch.Tensor]:
    """Pages in the canonical layout as those of all tensors; integers are rotated, with a scale per token and head."""
    if not isinstance(kv, PackedKV):
        return (data.transpose(3, 4) if isinstance(kv, HeadMajorKV) else data).unbind(1)
    scales: Sequence[torch.Tensor] = ()
    dtype = tensors_of(kv)[0].dtype
    if dtype == torch.uint8:
        codes, steps = encoded(data.transpose(3, 4).float())
        return *packed(*codes.unbind(1), kv.page_size), *steps.unbind(1)
    if dtype == torch.int8:
        data = rotated(data)
        steps = data.abs().amax(-1) / LARGEST_INT8
        data = (data / steps.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)).round()
        scales = steps.transpose(3, 4).unbind(1)
    if kv.page_size % SUBPAGE:
        return *data.to(dtype).transpose(3, 4).unbind(1), *scales
    numbers = data.to(dtype).unflatten(3, (-1, SUBPAGE))
    keys = numbers[:, 0].unflatten(-1, (-1, 2)).permute(0, 1, 4, 2, 5, 3, 6)
    values = numbers[:, 1].unflatten(3, (-1, 2)).permute(0, 1, 5, 2, 3, 6, 4)
    return keys, values, *scales


def _index(kv: KVCache, pages: Sequence[int]) -> torch.Tensor:
    assert all(0 <= page < kv.num_pages for page in pages), f"pages outside 0..{kv.num_pages - 1}: {pages}"
    return torch.tensor(pages, dtype=torch.int64, device=tensors_of(kv)[0].device)
