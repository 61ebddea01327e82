"""Window groups bring what whole pages bring: the same tokens and logprobs, bit for bit on native kernels.

Prompts pass the window several times; steps are cut, requests preempted, prompts found again, turns continued, drafts
run, steps overlapped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.canonical import tensors_of
from tests.checkpoints import make_checkpoint
from tests.near_ties import BFLOAT16, FLOAT32, assert_same_but_for_near_ties
from tests.seeding import seed_for
from tests.tiers import some
from tokenmill import LLM, SamplingParams
from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.engine.runner.model_runner import ModelRunner
from tokenmill.engine.scheduler.resources.windows import Windows
from tokenmill.lab.simulate.replay import replay
from tokenmill.model.kernels.native import load_kernels
from tokenmill.startup.assembly.setup import BuiltEngine, build_engine

SEED = seed_for(__name__)
FAMILIES = ("gemma3", "gemma4", "gemma4_moe", "gpt_oss")
HAS_NATIVE = load_kernels(1) is not None
# Small pools: the window group has room for two windows of 9 (24 for gpt-oss) and a step.
SMALL = {"num_pages": 60, "max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 16, "num_threads": 1}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"sliding_window": 20} if request.param == "gpt_oss" else {}
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, seed=SEED, **sizes)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(SEED)
    drawn = [rng.integers(0, 300, int(length)).tolist() for length in rng.integers(1, 250, 6)]
    shared = rng.integers(0, 300, 100).tolist()
    return [*drawn, *drawn[:2], *([*shared, *drawn[number][:50]] for number in range(2))]


def generate(folder: Path, prompts: list[list[int]], whole: bool, **flags: Any) -> list[Any]:
    """Tokens and logprobs of every prompt, cold and warm, then of a session of three turns."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=8)
    found = []
    with LLM(folder, disable_hybrid_kv_cache_manager=whole, **{**SMALL, **flags}) as llm:
        for _ in range(2):
            for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False):
                (answer,) = output.outputs
                ranked = [{token: one.logprob for token, one in step.items()} for step in answer.logprobs]
                found.append((list(answer.token_ids), ranked))
        with llm.session() as session:
            for prompt in prompts[:3]:
                found.append((list(session.send(prompt[:100], params).token_ids), None))
    return found


FLAGS: dict[str, dict[str, Any]] = {
    "chunks": {},
    "few pages": {"num_pages": 24, "admission": "optimistic"},
    "no cache": {"enable_prefix_caching": False},
    "overlap": {"async_scheduling": True},
    "drafts": {"speculative_config": "suffix"},
    "one call a kernel": {"attention_backend": "cpu"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "int4 KV": {"kv_cache_dtype": "int4"},
}


@pytest.mark.skipif(not HAS_NATIVE, reason="the native kernels are not built here")
@pytest.mark.parametrize("name", some(list(FLAGS), 4))
def test_tokens_and_logprobs_are_those_of_whole_pages(folder: Path, prompts: list[list[int]], name: str) -> None:
    flags = FLAGS[name]
    whole, grouped = (generate(folder, prompts, is_whole, dtype="bfloat16", **flags) for is_whole in (True, False))
    if flags.get("attention_backend") == "cpu":  # its sums depend on what else is in a step
        assert_same_answers(whole, grouped, prompts, BFLOAT16)
    else:
        assert whole == grouped, f"seed {SEED}"


def test_tokens_are_those_of_whole_pages_in_float32(folder: Path, prompts: list[list[int]]) -> None:
    flags = {"dtype": "float32", "page_size": 4, "num_pages": 240, "attention_backend": "reference", "kernels": "torch"}
    whole, grouped = (generate(folder, prompts, is_whole, **flags) for is_whole in (True, False))
    assert_same_answers(whole, grouped, prompts, FLOAT32)


def assert_same_answers(whole: list[Any], grouped: list[Any], prompts: list[list[int]], within: float) -> None:
    """All but sessions: once turns differ by a near tie, so do their prompts."""
    answers = list(zip(whole, grouped, strict=True))[: 2 * len(prompts)]
    for number, (one, other) in enumerate(answers):
        assert_same_but_for_near_ties(one, other, within, f"answer {number}")


def built(folder: Path, **flags: Any) -> BuiltEngine:
    return build_engine(EngineConfig(model=str(folder), **{**SMALL, **flags}).resolve())


@pytest.mark.parametrize("attention", ["reference", "cpu", "native"])
def test_what_lies_behind_windows_and_on_page_0_is_never_read(
    folder: Path, prompts: list[list[int]], attention: str
) -> None:
    """With no numbers on page 0 and in every page that nobody has, tokens are what they were."""
    flags = {"dtype": "float32", "page_size": 4, "num_pages": 240, "attention_backend": attention}
    if attention == "native":
        if not HAS_NATIVE:
            pytest.skip("the native kernels are not built here")
        flags = {"dtype": "bfloat16", "attention_backend": attention}
    found = []
    for poisons in (False, True):
        engine = built(folder, **flags).engine
        runner = engine.executor.runner  # type: ignore[attr-defined]
        assert isinstance(runner, ModelRunner)
        windows = engine.scheduler.resource(Windows)
        assert windows is not None
        if poisons:
            start = runner.start

            def poisoned(
                plan: Any, previous: Any, start: Any = start, runner: Any = runner, pool: Any = windows.pages
            ) -> Any:
                free = [0, *(page for page in range(1, pool.pool.num_pages) if pool.pool._is_free[page])]
                groups = zip(runner._attention.backends, runner._attention.are_windowed, strict=True)
                for backend, is_windowed in groups:
                    if is_windowed:
                        for tensor in tensors_of(backend.kv):
                            tensor[:, free] = torch.nan
                return start(plan, previous)

            runner.start = poisoned  # type: ignore[method-assign]
        found.append(run(engine, prompts))
        engine.close()
    assert found[0] == found[1], f"seed {SEED}"


def run(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    tokens: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        engine.add(AddRequest(id=str(number), prompt_token_ids=prompt, params=params))
        tokens[str(number)] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[output.id] += output.token_ids
    return list(tokens.values())


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_recorded_schedule_with_windows_is_replayed(
    folder: Path, prompts: list[list[int]], tmp_path: Path, has_disk: bool
) -> None:
    log = tmp_path / "steps"
    flags = {"kv_disk": str(tmp_path / "kv"), "kv_disk_size": 1 << 26} if has_disk else {}
    if has_disk:  # what the recorded engine loads
        engine = built(folder, dtype="float32", page_size=4, num_pages=150, **flags).engine
        first = run(engine, prompts[:4])
        engine.close()
    engine = built(folder, dtype="float32", page_size=4, num_pages=150, step_log=str(log), **flags).engine
    found = run(engine, prompts)
    if has_disk:
        assert found[:4] == first
        assert engine.stats().num_loaded_tokens > 0
    engine.close()
    outcome = replay(log)
    assert outcome.difference is None
    assert outcome.num_plans > 20


def test_the_start_says_what_becomes_of_pages_behind_windows(folder: Path, tmp_path: Path) -> None:
    said = built(folder).ready.kv_windows
    assert "pages for sliding windows of" in said
    assert built(folder, disable_hybrid_kv_cache_manager=True).ready.kv_windows.endswith(
        "are kept: --disable-hybrid-kv-cache-manager"
    )
    beside_a_disk = built(folder, kv_disk=str(tmp_path / "kv"), kv_disk_size=1 << 24)
    assert "pages for sliding windows of" in beside_a_disk.ready.kv_windows
    beside_a_disk.engine.close()
    talks = built(folder, slot_save_path=str(tmp_path / "talks"))
    assert "pages for sliding windows of" in talks.ready.kv_windows
    talks.engine.close()


def test_stats_say_what_the_window_group_has(folder: Path, prompts: list[list[int]]) -> None:
    engine = built(folder).engine
    assert engine.stats().num_window_pages > engine.stats().num_window_pages_pinned == 0
    run(engine, prompts[:3])
    stats = engine.stats()
    assert stats.num_window_pages_pinned == 0
    assert 0 < stats.num_window_pages_evictable <= stats.num_window_pages


def test_a_model_without_windows_has_one_group_and_says_nothing(tmp_path: Path) -> None:
    one = built(make_checkpoint(tmp_path, "qwen3"))
    assert one.ready.kv_windows == ""
    assert one.engine.scheduler.resource(Windows) is None
    assert one.engine.stats().num_window_pages == 0
