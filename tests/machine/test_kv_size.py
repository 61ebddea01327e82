"""How the KV cache is sized, and what is said when one request does not fit."""

from __future__ import annotations

import pytest

from tokenmill.config import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.machine.kv_size import KVSize, decide_kv_size

PAGE = 1000  # bytes


def size(max_position: int = 1024, available: int = 10**9, **flags: object) -> KVSize:
    config = EngineConfig(device="cpu", **flags).resolve()  # type: ignore[arg-type]
    return decide_kv_size(config, max_position, PAGE, available)


def test_a_share_of_free_memory_is_taken() -> None:
    assert size(available=1_000_000, gpu_memory_utilization=0.5) == KVSize(499, 1024)


def test_no_more_than_all_rows_could_use() -> None:
    assert size(max_num_seqs=2) == KVSize(128, 1024)


def test_explicit_bytes_and_pages_win() -> None:
    assert size(kv_cache_memory_bytes=100_000).num_pages == 99
    assert size(kv_cache_memory_bytes=100_000, num_pages=70).num_pages == 70


def test_auto_context_shrinks_to_what_fits() -> None:
    assert size(num_pages=10) == KVSize(10, 160)


def test_a_context_that_was_asked_for_is_never_shrunk() -> None:
    with pytest.raises(InvalidConfig, match=r"holds 160 tokens.*needs 64 pages.*--num-pages to 64"):
        size(num_pages=10, max_model_len=1024)


def test_a_pool_of_no_use_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="--kv-cache-memory-bytes to 65000, or lower --max-model-len to 32"):
        size(kv_cache_memory_bytes=3000)


def test_the_advice_of_a_refusal_works() -> None:
    with pytest.raises(InvalidConfig) as refusal:
        size(num_pages=10, max_model_len=1024)
    assert "--kv-cache-memory-bytes" not in str(refusal.value)  # --num-pages would still win
    assert str(refusal.value).endswith("raise --num-pages to 64, or lower --max-model-len to 160")
    assert size(num_pages=64, max_model_len=1024) == KVSize(64, 1024)
    assert size(num_pages=10, max_model_len=160) == KVSize(10, 160)
    assert size(kv_cache_memory_bytes=65000, max_model_len=1024) == KVSize(64, 1024)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="exceeds the model's context of 1024"):
        size(max_model_len=2048)
