"""Pages go out and in as they lie, in every layout, and no other page is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.canonical import tensors_of
from tokenmill.engine.transfer.checksum import find_checksum
from tokenmill.engine.transfer.orders import write_one_by_one
from tokenmill.engine.transfer.page_mover import RawPages, layout_of
from tokenmill.model.attention.packed_kv import PackedKV
from tokenmill.model.attention.protocol import AttentionSpec, KVCache
from tokenmill.model.attention.tensor_kv import HeadMajorKV, TokenMajorKV

SPEC = AttentionSpec(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)


def make_cache(kind: type[KVCache], dtype: str, is_page_first: bool = False) -> KVCache:
    cache = kind(SPEC, 5, 16, dtype, "cpu", is_page_first=is_page_first)
    for tensor in tensors_of(cache):
        bits = tensor.view(torch.uint8)
        bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8))
    return cache


def pages_of(cache: KVCache, page: int) -> list[bytes]:
    return [tensor[:, page].contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors_of(cache)]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (HeadMajorKV, "float32"),
        (TokenMajorKV, "float16"),
        (PackedKV, "bfloat16"),
        (PackedKV, "int8"),
    ],
)
def test_a_page_that_was_read_and_written_elsewhere_is_the_same_bits(
    rng: np.random.Generator, kind: type[KVCache], dtype: str
) -> None:
    source, target = (make_cache(kind, dtype, bool(rng.random() < 0.5)) for _ in range(2))
    movers = [RawPages(cache.pieces, "layout") for cache in (source, target)]
    others = {page: pages_of(target, page) for page in (0, 1, 2, 4)}
    assert movers[0].page_bytes == kind.bytes_per_page(SPEC, 16, dtype)
    data = memoryview(bytearray(movers[0].page_bytes))
    movers[0].read(2, data)
    movers[1].write(3, data)
    assert pages_of(target, 3) == pages_of(source, 2)
    assert {page: pages_of(target, page) for page in others} == others


@pytest.mark.parametrize("num_good", [0, 1, 2, 3])
def test_pages_are_filled_as_far_as_their_bytes_are_right(rng: np.random.Generator, num_good: int) -> None:
    """The same for a mover that checks page by page before it writes."""
    source, (target, other) = make_cache(PackedKV, "int8"), (make_cache(PackedKV, "int8") for _ in range(2))
    movers, (_, checksum) = [RawPages(cache.pieces, "layout") for cache in (source, target, other)], find_checksum()
    size, pages, wanted = movers[0].page_bytes, [4, 0, 3], [2, 1, 4]
    data = memoryview(bytearray(3 * size))
    for number, page in enumerate(wanted):
        movers[0].read(page, data[number * size : (number + 1) * size])
    checksums = [checksum(data[number * size : (number + 1) * size]) for number in range(3)]
    if num_good < 3:
        data[num_good * size + int(rng.integers(size))] ^= 1 << int(rng.integers(8))
    untouched = pages_of(other, pages[min(num_good, 2)])
    assert movers[1].write_good(pages, data, checksums) == num_good
    assert write_one_by_one(movers[2], pages, data, checksums) == num_good
    for page, its_source in zip(pages[:num_good], wanted, strict=False):
        assert pages_of(target, page) == pages_of(other, page) == pages_of(source, its_source)
    assert num_good == 3 or pages_of(other, pages[num_good]) == untouched


def test_pages_of_other_layouts_types_and_shapes_have_other_names() -> None:
    caches = [
        HeadMajorKV(SPEC, 3, 16, "float32", "cpu"),
        HeadMajorKV(SPEC, 3, 16, "bfloat16", "cpu"),
        HeadMajorKV(SPEC, 3, 32, "float32", "cpu"),
        TokenMajorKV(SPEC, 3, 16, "float32", "cpu"),
    ]
    names = [layout_of(cache.tensors, "one") for cache in caches] + [layout_of(caches[0].tensors, "two")]
    assert len(set(names)) == len(names)
    others = [HeadMajorKV(SPEC, 9, 16, "float32", "cpu", is_page_first=is_first) for is_first in (False, True)]
    assert {layout_of(cache.tensors, "one") for cache in others} == {names[0]}, "any number, in any order"
