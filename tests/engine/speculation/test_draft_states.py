"""Drafts on models with recurrent states: no token changes, whatever was drafted, kept, found again or taken back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.runner.fake_platform import FakePlatform
from tests.engine.runner.test_draft_model import greedy, prompts
from tests.engine.runner.test_drafts import KINDS, NATIVE, check, lying, nan_in_new_memory, requests
from tests.engine.runner.test_not_numbers import run, running
from tests.engine.runner.told import assert_same, told
from tests.model.kernels.gpu import DEVICE
from tests.seeding import seed_for
from tokenmill import LLM, SamplingParams
from tokenmill.core.messages import AddRequest
from tokenmill.engine.loop.engine import Engine

SEED = seed_for(__name__)
FAMILIES = ("lfm2", "lfm2_moe", "granite_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next")
SHAPE = {"hidden_size": 64, "head_dim": 32}
TORCH: dict[str, Any] = {"dtype": "float32", "kernels": "torch", "attention_backend": "cpu"}
TIGHT: dict[str, Any] = {"num_pages": 13, "max_model_len": 120, "admission": "optimistic", "max_num_seqs": 5}


def answers(engine: Engine, wanted: list[AddRequest]) -> list[Any]:
    ran = run(engine, wanted)
    return [told(ran[request.id]) for request in wanted]


@pytest.mark.parametrize(
    "options", [NATIVE, {**NATIVE, "async_scheduling": True}, TORCH], ids=["native", "ov", "torch"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_output_changes_whatever_is_asked_for(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    """Twice on one engine: the second time prompts are found in the cache, with their states."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    model = make_checkpoint(tmp_path, family, seed=SEED, **SHAPE)
    wanted = requests(rng, KINDS, 40)
    with running(model, **options) as engine:
        plain = answers(engine, wanted)
        for _ in range(2):
            engine.scheduler.state.drafters = (lying(wanted, plain, rng, "async_scheduling" in options),)
            assert_same(plain, answers(engine, wanted), options is not TORCH)
        stats = engine.stats()
        assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens  # how many depends on the drawn requests


@pytest.mark.parametrize("options", [NATIVE, TORCH], ids=["native", "torch"])
@pytest.mark.parametrize("family", ["lfm2", "granite_hybrid", "qwen3_5"])
def test_preempted_requests_go_on_from_states_that_have_seen_no_draft(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    model = make_checkpoint(tmp_path, family, seed=SEED, **SHAPE)
    wanted = [greedy(str(number), one, 60) for number, one in enumerate(prompts(rng, [40, 7, 33, 16, 20, 1, 50, 12]))]
    tight = {**options, **TIGHT, "num_pages": TIGHT["num_pages"] * 16 // options.get("page_size", 4)}
    with running(model, **options, max_model_len=120) as engine:
        plain = answers(engine, wanted)
    with running(model, **tight) as engine:
        engine.scheduler.state.drafters = (lying(wanted, plain, rng),)
        assert_same(plain, answers(engine, wanted), options is NATIVE)
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_accepted_tokens > 100


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "granite_hybrid"])
def test_turns_of_conversations_begin_behind_kept_and_stored_states(tmp_path: Path, family: str) -> None:
    """Each turn goes on behind the text of the one before, on an engine that still has it and on one that loads it."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    model = make_checkpoint(tmp_path / "model", family, seed=SEED, max_position_embeddings=700, **SHAPE)
    options = {**NATIVE, "max_model_len": 600, "num_pages": 80, "max_num_batched_tokens": 200}
    turns, text, expected = [prompts(rng, [length])[0] for length in (70, 30, 45)], list[int](), []
    for turn in turns:
        text += turn
        with running(model, **options, enable_prefix_caching=False) as engine:
            (plain,) = answers(engine, [greedy("plain", text, 90)])
        expected.append((list(text), plain))
        text += plain[0][0]
    for number, (prompt, plain) in enumerate(expected):
        stored = {"kv_disk": str(tmp_path / "disk"), "kv_disk_size": 64 << 20}
        with running(model, **options, **stored) as engine:
            for again in range(2):
                wanted = [greedy(f"{number} {again}", prompt, 90)]
                engine.scheduler.state.drafters = (lying(wanted, [plain], rng),)
                ran = run(engine, wanted)
                assert_same([plain], [told(ran[wanted[0].id])], True)
                (first, *_) = ran[wanted[0].id]
                assert first.num_cached_tokens > 0 or (number, again) == (0, 0)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize("family", ["lfm2", "granite_hybrid", "qwen3_5", "qwen3_next"])
def test_drafters_of_text_bring_more_than_a_token_a_step(tmp_path: Path, family: str, method: str) -> None:
    """Greedy random models soon repeat themselves."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    model = make_checkpoint(tmp_path, family, seed=SEED, **SHAPE)
    asked = [{"prompt_token_ids": one} for one in prompts(rng, [5, 20, 40])]
    found, sizes = [], {"num_pages": 60, "max_model_len": 256, "max_num_seqs": 4}
    for params in (
        SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=7, max_tokens=60, ignore_eos=True, logprobs=1),
    ):
        for speculation in (None, method):
            with LLM(model, dtype="bfloat16", **sizes, speculative_config=speculation) as llm:
                outputs = [one.outputs[0] for one in llm.generate(asked, params, use_tqdm=False)]
                found.append([(one.token_ids, one.logprobs) for one in outputs])
        assert found[-1] == found[-2]


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
def test_nor_on_a_device(tmp_path: Path) -> None:
    """Steps with drafts run in no graph: which states stay is told for each request."""
    rng, shape = random.Random(SEED), {"num_key_value_heads": 1, "num_attention_heads": 2}
    model = make_checkpoint(tmp_path, "lfm2", seed=SEED, **shape)
    small = {"dtype": "float32", "num_pages": 60, "batch_invariant": True, "async_scheduling": False}
    small |= {"max_num_seqs": 4, "max_num_batched_tokens": 40}
    with nan_in_new_memory(), running(model, FakePlatform(), **small) as engine:
        _, drafted = check(engine, requests(rng, [KINDS[1], KINDS[4]], 12), rng, is_exact=False, lengths=(1, 3))
        assert max(drafted) > 1
