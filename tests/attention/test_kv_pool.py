from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenmill.attention.kv_pool import KVPool
from tokenmill.attention.protocol import AttentionSpec
from tokenmill.attention.select import select
from tokenmill.errors import InvalidConfig

SPEC = AttentionSpec(3, 4, 2, 6, 1.0)


def make_pool(num_pages: int = 9, page_size: int = 4) -> KVPool:
    return KVPool(SPEC, num_pages, page_size, torch.float32, "cpu")


def test_export_shows_what_was_written_token_by_token(rng: np.random.Generator) -> None:
    pool = make_pool()
    slots = torch.from_numpy(rng.permutation(9 * 4)[:10].copy())
    written = {}
    for layer in range(3):
        k, v = torch.randn(10, 2, 6), torch.randn(10, 2, 6)
        pool.write(layer, pool.slot_rows(slots), k, v)
        written[layer] = torch.stack((k, v))
    data = pool.export(range(9))
    assert data.shape == (3, 2, 9, 4, 2, 6)
    for layer, both in written.items():
        torch.testing.assert_close(data[layer].flatten(1, 2)[:, slots], both, rtol=0, atol=0)


def test_import_into_other_pages_of_another_pool_round_trips(rng: np.random.Generator) -> None:
    pool, other = make_pool(), make_pool(num_pages=5)
    pool.keys.normal_()
    pool.values.normal_()
    pages = [7, 2, 5]
    other.import_([4, 1, 2], pool.export(pages))
    assert torch.equal(other.export([4, 1, 2]), pool.export(pages))
    assert other.export([0, 3]).count_nonzero() == 0


def test_gather_follows_the_order_of_the_pages() -> None:
    pool = make_pool()
    pool.keys.copy_(torch.arange(9.0).view(1, 9, 1, 1, 1).expand_as(pool.keys))
    keys, _ = pool.gather(1, pool.page_rows(torch.tensor([5, 0, 8])))
    assert keys.shape == (2, 12, 6)
    assert keys[0, :, 0].tolist() == [5.0] * 4 + [0.0] * 4 + [8.0] * 4


def test_num_bytes_is_what_the_memory_takes() -> None:
    assert make_pool().num_bytes == 2 * 3 * 2 * 9 * 4 * 6 * 4


def test_pages_outside_the_pool_are_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="outside"):
        make_pool().export([9])


def test_auto_says_why_it_is_not_native() -> None:
    backend, reason = select("auto", "cpu", SPEC, 4, 16, torch.float32)
    assert backend.name == "cpu"
    assert reason == "batched torch: the native attention is for bfloat16, not float32"
    assert select("reference", "cpu", SPEC, 4, 16, torch.bfloat16)[0].name == "reference"


def test_an_unknown_backend_is_refused_with_the_choices() -> None:
    with pytest.raises(InvalidConfig, match="flashy is unknown; choose one of auto, reference, cpu"):
        select("flashy", "cpu", SPEC, 4, 16, torch.bfloat16)


def test_the_cpu_backend_is_refused_elsewhere() -> None:
    with pytest.raises(InvalidConfig, match="does not run on device meta"):
        select("cpu", "meta", SPEC, 4, 16, torch.bfloat16)
    backend, reason = select("auto", "meta", SPEC, 4, 16, torch.bfloat16)
    assert (backend.name, reason) == ("reference", "runs on any device")
