"""A context over two devices that do not exist: each has half of the KV, and clients are told what one device tells."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.parallel.devices.counting import RankPlatform
from tests.engine.parallel.devices.test_engine import SMALL, built_ranks, read_calls
from tests.engine.runner.test_not_numbers import run
from tests.engine.runner.told import told
from tests.model.kernels.gpu import DEVICE
from tests.seeding import seed_for
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.triton import attention, splits
from tokenmill.model.sharding.shard import check_context
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.startup.assembly.setup import build_engine
from tokenmill.startup.machine.device import check

pytestmark = [
    pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here"),
    pytest.mark.skipif(DEVICE != "cpu", reason="interpreted"),
]

SEED = seed_for(__name__)
PAGE = 16
# As few pages as two long requests do not fit in.
LONG: dict[str, Any] = {**SMALL, "page_size": PAGE, "num_pages": 5, "max_model_len": 3 * PAGE}
LONG |= {"max_num_batched_tokens": 40, "max_num_seqs": 3, "enforce_eager": True}
# Interpreted, a row's last bit depends on its place in a tile, which splits in common change.
LONG["shared_splits"] = False
# Family and its shape.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "a key head": ("qwen3", {"num_key_value_heads": 1, "num_hidden_layers": 1, "tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {"num_hidden_layers": 1}),
}


@pytest.fixture(autouse=True)
def splits_of_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split contexts at every page in this process, as `peer.py` does in the other."""
    monkeypatch.setattr(splits, "SPLIT_KEYS", PAGE)
    monkeypatch.setattr(attention, "SPLIT_KEYS", PAGE)


def requests(rng: random.Random) -> list[AddRequest]:
    """Two that end a page while they decode, one of which begins as the other does; and short ones of other kinds."""
    begin = [rng.randrange(250) for _ in range(PAGE)]
    prompts = [begin + [rng.randrange(250) for _ in range(2 * PAGE - 3 - len(begin))] for _ in range(2)]
    prompts += [begin + [rng.randrange(250) for _ in range(rng.randint(1, 9))], [rng.randrange(250)]]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.9, "logprobs": 1},
        {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.7, "logprobs": 0},
        {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 1},
    ]
    params = [SamplingParams(**{"seed": seed, "max_tokens": 7, **kind}) for seed, kind in enumerate(kinds)]
    pairs = enumerate(zip(prompts, params, strict=True))
    return [AddRequest(id=str(number), prompt_token_ids=prompt, params=own) for number, (prompt, own) in pairs]


@pytest.mark.parametrize("name", MODELS)
def test_two_devices_share_contexts_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Chunks, decodes, prefix hits and preemptions; twice, the second time over cached pages."""
    print(f"seed {SEED}")
    family, shape = MODELS[name]
    folder = make_checkpoint(tmp_path / "model", family, seed=SEED, **shape)
    wanted, records, ready = requests(random.Random(SEED)), [], []
    config = EngineConfig(model=str(folder), **LONG).resolve()
    alone = build_engine(config, platform=RankPlatform())
    shared = dataclasses.replace(config, context_parallel_size=2, enforce_eager=False)
    with contextlib.closing(alone.engine), built_ranks(shared, tmp_path) as (built, platform, _):
        for each in (alone, built):
            outputs = [run(each.engine, wanted) for _ in range(2)]
            records.append([told(out[request.id]) for out in outputs for request in wanted])
            ready.append(each.ready)
            assert each.engine.stats().num_preemptions > 0
            assert max(own[0].num_cached_tokens for own in outputs[1].values()) >= PAGE
        assert platform.replays == 0, "nothing is captured"
        own = platform.calls
    assert records[0] == records[1]
    # Six pages, page 0 among them, and half of five beside a page 0.
    assert ready[1].kv_bytes * 6 == ready[0].kv_bytes * 4
    assert "pages over 2 GPUs, so without CUDA graphs" in ready[1].attention_reason
    assert read_calls(tmp_path, 1) == own, "all ranks make the same calls in the same order"
    assert {name for calls in own.values() for name, _, _ in calls} == {"gather", "share"}


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_devices_that_share_contexts_hold_twice_the_pages(is_asked_for: bool, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=1)
    asked = {"kv_cache_memory_bytes": 1 << 17, "max_num_seqs": 40} if is_asked_for else {}
    config = EngineConfig(model=str(model), **{**LONG, "num_pages": None, **asked}).resolve()
    alone = build_engine(config, platform=RankPlatform())
    alone.engine.close()
    with built_ranks(dataclasses.replace(config, context_parallel_size=2), tmp_path) as (built, _, _):
        if is_asked_for:
            assert alone.ready.kv_bytes <= 1 << 17
            assert built.ready.kv_bytes == alone.ready.kv_bytes
            assert built.ready.num_pages == 2 * alone.ready.num_pages
        (output,) = run(built.engine, requests(random.Random(SEED))[-1:])["3"][-1:]
        assert output.finish_reason


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"speculative_config": "suffix"}, "verify no drafts yet; leave out --speculative-config"),
        ({"enable_lora": True}, "--enable-lora needs one GPU"),
        ({"batch_invariant": True}, "which --batch-invariant does not allow"),
        ({"page_size": 2 * PAGE}, f"--context-parallel-size on GPUs needs --page-size {PAGE}: a page is a split"),
    ],
)
def test_what_devices_that_share_contexts_lack(options: dict[str, Any], sentence: str) -> None:
    own = {"device": "cpu", "dtype": "float32", "context_parallel_size": 2, "page_size": PAGE, **options}
    with pytest.raises(InvalidConfig, match=sentence):
        check(EngineConfig(**own).resolve(), RankPlatform())


def test_windows_are_refused(tmp_path: Path) -> None:
    architecture = read_architecture(make_checkpoint(tmp_path / "windows", "gemma3", tokenizer=False))
    check_context(architecture, 2)
    with pytest.raises(InvalidConfig, match="layers with a sliding window have their keys on one GPU"):
        check_context(architecture, 2, on_devices=True)
