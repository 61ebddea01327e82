"""Size the KV cache, and check the message when one request does not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.model.kernels.gpu import DEVICE
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.model.attention.backends.triton import TritonDecodes
from tokenmill.model.attention.batch import DeviceLens
from tokenmill.model.attention.paged import Requests
from tokenmill.model.attention.protocol import AttentionSpec
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.startup.machine.device_memory import workspace_bytes
from tokenmill.startup.sizing.kv_size import KVSize, decide_kv_size

PAGE = 1000  # bytes


def size(max_position: int = 1024, available: int = 10**9, **flags: object) -> KVSize:
    config = EngineConfig(device="cpu", **flags).resolve()  # type: ignore[arg-type]
    return decide_kv_size(config, max_position, PAGE, available)


def test_a_share_of_free_memory_is_taken() -> None:
    assert size(available=1_000_000, gpu_memory_utilization=0.5) == KVSize(499, 1024)


def test_engines_of_one_machine_share_that() -> None:
    assert size(available=40 * PAGE * 1000, replica=(1, 4)).num_pages * 4 <= size(available=40 * PAGE * 1000).num_pages
    on_gpus = EngineConfig(device="cuda:1", replica=(1, 4)).resolve()
    alone = EngineConfig(device="cuda:1").resolve()
    assert decide_kv_size(on_gpus, 1024, PAGE, 10**8) == decide_kv_size(alone, 1024, PAGE, 10**8), "each has its own"


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


def test_a_step_reserves_logits_as_the_sampler_reads_them_and_the_parts_of_split_contexts(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    architecture = read_architecture(make_checkpoint(tmp_path / "m", "qwen3", max_position_embeddings=40_960))
    attention = architecture.layers[0].attention

    def needed(rows: int, context: int) -> int:
        config = EngineConfig(device="cpu", max_num_seqs=rows, max_model_len=context, max_num_batched_tokens=2048)
        return workspace_bytes(config.resolve(), architecture, context, 2)

    rows, context = int(rng.integers(2, 300)), int(rng.integers(300, 40_000))
    heads = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
    decodes = TritonDecodes(AttentionSpec(1, *heads), 4)
    lens = np.full(2, context, dtype=np.int32)
    own = DeviceLens(torch.from_numpy(lens).to(DEVICE), torch.arange(3, dtype=torch.int32, device=DEVICE))
    table = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    splits = decodes.plan(Requests(slice(0, 2), table, own, np.ones(2, dtype=np.int32), lens))[1]
    assert splits is not None
    assert needed(rows, context) - needed(1, context) == (rows - 1) * (
        2 * 2 * architecture.vocab_size + splits.parts.nbytes // 2
    )
