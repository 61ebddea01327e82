from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.canonical import export, import_, tensors_of
from tokenmill.model.attention.packed_kv import PackedKV
from tokenmill.model.attention.protocol import AttentionSpec, KVCache
from tokenmill.model.attention.tensor_kv import HeadMajorKV, TokenMajorKV
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.platform.arrays import itemsize

SPEC = AttentionSpec(3, 4, 2, 6)


both_orders = pytest.mark.parametrize("is_page_first", [False, True])


def make_cache(num_pages: int = 9, page_size: int = 4, is_page_first: bool = False) -> HeadMajorKV:
    return HeadMajorKV(SPEC, num_pages, page_size, "float32", "cpu", is_page_first=is_page_first)


@both_orders
def test_export_shows_what_was_written_token_by_token(rng: np.random.Generator, is_page_first: bool) -> None:
    cache = make_cache(is_page_first=is_page_first)
    slots = torch.from_numpy(rng.permutation(9 * 4)[:10].copy())
    written = {}
    for layer in range(3):
        k, v = torch.randn(10, 2, 6), torch.randn(10, 2, 6)
        cache.write(layer, cache.slot_rows(slots), k, v)
        written[layer] = torch.stack((k, v))
    data = export(cache, range(9))
    assert data.shape == (3, 2, 9, 4, 2, 6)
    for layer, both in written.items():
        torch.testing.assert_close(data[layer].flatten(1, 2)[:, slots], both, rtol=0, atol=0)


def test_import_into_other_pages_of_another_cache_round_trips(rng: np.random.Generator) -> None:
    cache, other = make_cache(), make_cache(num_pages=5)
    cache.keys.normal_()
    cache.values.normal_()
    pages = [7, 2, 5]
    import_(other, [4, 1, 2], export(cache, pages))
    assert torch.equal(export(other, [4, 1, 2]), export(cache, pages))
    assert export(other, [0, 3]).count_nonzero() == 0


@both_orders
def test_gather_follows_the_order_of_the_pages(is_page_first: bool) -> None:
    cache = make_cache(is_page_first=is_page_first)
    cache.keys.copy_(torch.arange(9.0).view(1, 9, 1, 1, 1).expand_as(cache.keys))
    keys, _ = cache.gather(1, cache.page_rows(torch.tensor([5, 0, 8])))
    assert keys.shape == (2, 12, 6)
    assert keys[0, :, 0].tolist() == [5.0] * 4 + [0.0] * 4 + [8.0] * 4


@pytest.mark.parametrize("layout", [HeadMajorKV, TokenMajorKV, PackedKV])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_layout_knows_the_bytes_of_a_page_before_there_is_one(layout: type[KVCache], dtype: str) -> None:
    numbers = 2 * 3 * 2 * 32 * 6
    scales = 4 * numbers // 6 if layout is PackedKV and dtype == "int8" else 0
    assert layout.bytes_per_page(SPEC, 32, dtype) == numbers * itemsize(dtype) + scales
    assert layout(SPEC, 9, 32, dtype, "cpu").num_bytes == 9 * layout.bytes_per_page(SPEC, 32, dtype)


@pytest.mark.parametrize("layout", [HeadMajorKV, PackedKV])
def test_a_page_of_page_first_memory_is_one_piece(layout: type[KVCache]) -> None:
    cache = layout(SPEC, 9, 32, "float32", "cpu", is_page_first=True)
    (memory,) = map(tensor_over, cache.pieces)
    assert memory.shape == (1, 9, layout.bytes_per_page(SPEC, 32, "float32"))
    for tensor in tensors_of(cache):
        tensor[:, 4] = 1.0
    is_touched = memory[0].view(torch.float32)
    assert bool((is_touched[4] == 1).all())
    assert is_touched.count_nonzero() == is_touched[4].numel(), "no other page"


def test_pages_outside_the_cache_are_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="outside"):
        export(make_cache(), [9])
