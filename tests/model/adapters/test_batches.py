"""A request's tokens and log probabilities are its own, bit for bit, whatever adapters it shares its steps with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.model.adapters.trained import change_tensors, make_adapter
from tokenmill import LLM, LoRARequest, SamplingParams
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig, InvalidRequest
from tokenmill.model.kernels.native import load_kernels
from tokenmill.startup.assembly.step_costs import SIZES

needs_native = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")
PARAMS = SamplingParams(max_tokens=20, temperature=0.8, seed=7, logprobs=3, ignore_eos=True)
NUM_ADAPTERS = 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 64, "intermediate_size": 80, "attention_bias": True}
    return make_checkpoint(tmp_path_factory.mktemp("base"), "qwen3", dtype=torch.bfloat16, **shape)


@pytest.fixture(scope="module")
def outside(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """Adapters of embedding and head, too."""
    folder = tmp_path_factory.mktemp("outside")
    targets = (["embed_tokens", "lm_head", "q_proj"], ["lm_head"], ["embed_tokens", "up_proj"])
    for number, modules in enumerate(targets):
        make_adapter(base, folder / str(number), 50 + number, r=3 + number, target_modules=modules)
    return [None, *(LoRARequest(f"o{n}", 50 + n, str(folder / str(n))) for n in range(len(targets)))]


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    folder = tmp_path_factory.mktemp("adapters")
    targets = (["q_proj", "up_proj"], ["down_proj", "o_proj"], ["k_proj", "gate_proj"])
    for number in range(NUM_ADAPTERS):
        config: dict[str, Any] = {"r": 1 + 3 * number}
        if number < len(targets):
            config["target_modules"] = targets[number]
        make_adapter(base, folder / str(number), number, **config)
    return [None, *(LoRARequest(f"a{n}", n + 1, str(folder / str(n))) for n in range(NUM_ADAPTERS))]


def engine(base: Path, **options: Any) -> LLM:
    size = {"max_model_len": 160, "num_pages": 400, "max_num_seqs": 18, "enable_lora": True, "num_threads": 1}
    return LLM(base, **(size | options))


def run(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None]) -> list[Any]:
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=adapters)
    return [(list(output.outputs[0].token_ids), output.outputs[0].logprobs) for output in outputs]


def finish(llm: LLM, output: Any) -> None:
    while not output.finished:
        llm.step()


@needs_native
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_batch_of_all_equals_each_alone(
    quantization: str, base: Path, adapters: list[LoRARequest | None], rng: np.random.Generator
) -> None:
    own = [*adapters, *adapters]
    prompts = [rng.integers(3, 300, int(rng.integers(1, 70))).tolist() for _ in own]
    with engine(base, quantization=quantization, enable_prefix_caching=False) as llm:
        alone = [run(llm, [prompt], [adapter])[0] for prompt, adapter in zip(prompts, own, strict=True)]
        assert run(llm, prompts, own) == alone
    ways: dict[str, dict[str, Any]] = {
        "chunked, few slots": {"max_num_batched_tokens": 23, "max_loras": 2, "max_cpu_loras": 3},
        "preempted": {"num_pages": 13, "admission": "optimistic", "enable_prefix_caching": False},
        "overlapped": {"async_scheduling": True, "max_loras": 3},
    }
    for name, options in ways.items():
        with engine(base, quantization=quantization, **options) as llm:
            assert run(llm, prompts, own) == alone, name
            if name == "preempted":
                assert llm.stats().num_preemptions > 0
            else:
                assert run(llm, prompts, own) == alone, f"{name}, from the cache"
                assert llm.stats().prefix_hits > 0


@needs_native
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_embedding_and_head_too_are_each_request_s_own(
    quantization: str,
    base: Path,
    adapters: list[LoRARequest | None],
    outside: list[LoRARequest | None],
    rng: np.random.Generator,
) -> None:
    own = [*outside, *adapters[1:4], *outside]
    prompts = [rng.integers(3, 300, int(rng.integers(1, 70))).tolist() for _ in own]
    with engine(base, quantization=quantization, enable_prefix_caching=False, max_loras=6) as llm:
        alone = [run(llm, [prompt], [adapter])[0] for prompt, adapter in zip(prompts, own, strict=True)]
        assert run(llm, prompts, own) == alone
        greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
        together, single = (
            [
                (list(one.outputs[0].token_ids), one.prompt_logprobs)
                for group in groups
                for one in llm.generate(
                    [prompt for prompt, _ in group], greedy, use_tqdm=False, lora_request=[one for _, one in group]
                )
            ]
            for pairs in [list(zip(prompts, own, strict=True))]
            for groups in ([pairs], [[pair] for pair in pairs])
        )
        assert together == single
    with engine(base, quantization=quantization, max_num_batched_tokens=23, max_loras=2, max_cpu_loras=3) as llm:
        assert run(llm, prompts, own) == alone, "chunked, few slots"
    with pytest.raises(InvalidCheckpoint, match="needs one process"):
        engine(base, tensor_parallel_size=2, lora_modules=(f"o={outside[1].lora_path}",))


def test_a_copy_of_other_base_weights_is_refused(base: Path, tmp_path: Path) -> None:
    """PEFT stores the embedding beside an adapter of it."""
    make_adapter(base, tmp_path / "a", 1, target_modules=["embed_tokens"])
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    change_tensors(tmp_path / "a", lambda tensors: tensors[name].mul_(-1))
    with pytest.raises(InvalidCheckpoint, match="brings an embedding that is not the model's"):
        engine(base, lora_modules=(f"a={tmp_path / 'a'}",))


@needs_native
def test_base_requests_are_those_of_an_engine_without_adapters(
    base: Path, adapters: list[LoRARequest | None], rng: np.random.Generator
) -> None:
    prompts = [rng.integers(3, 300, 40).tolist() for _ in range(6)]
    with engine(base, enable_lora=False) as llm:
        expected = run(llm, prompts, [None] * 6)
    with engine(base) as llm:
        assert run(llm, prompts, [None] * 6) == expected
        mixed = run(llm, [*prompts, *prompts], [None] * 6 + adapters[1:7])
    assert mixed[:6] == expected
    assert all(one != two for one, two in zip(mixed[6:], expected, strict=True)), "these adapters change the answer"


@needs_native
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "quantization": "int8", "async_scheduling": True},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"context_parallel_size": 2},
    ],
    ids=["ranks", "stages of ranks", "ranks of a context"],
)
def test_ranks_have_their_parts_of_adapters(
    options: dict[str, Any], base: Path, adapters: list[LoRARequest | None], rng: np.random.Generator
) -> None:
    own = [*adapters, *adapters]
    prompts = [rng.integers(3, 300, int(rng.integers(1, 70))).tolist() for _ in own]
    with engine(base, quantization=options.get("quantization", "none")) as llm:
        alone = run(llm, prompts, own)
    few = {"max_num_batched_tokens": 60, "max_loras": 2, "max_cpu_loras": 3}
    with engine(base, **{**few, **options}) as llm:
        assert run(llm, prompts, own) == alone
        assert run(llm, prompts, own) == alone, "from the cache, with adapters that were forgotten and read again"


@needs_native
def test_drafts_change_nothing(
    base: Path, adapters: list[LoRARequest | None], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the times that are measured at the start may say that no draft pays.
    costs = [(size, 0.001) for size in SIZES]
    monkeypatch.setattr("tokenmill.startup.assembly.speculation.measure_step_costs", lambda make_engine: costs)
    prompts = [rng.integers(3, 9, 40).tolist() for _ in adapters]
    with engine(base) as llm:
        expected = run(llm, prompts, adapters)
    draft_model = json.dumps({"method": "draft_model", "model": str(base), "num_speculative_tokens": 3})
    for drafter in ("suffix", draft_model):
        with engine(base, speculative_config=drafter) as llm:
            assert run(llm, prompts, adapters) == expected, drafter
            assert llm.stats().num_draft_tokens > 0


def test_other_files_under_the_same_name_never_find_old_kv(
    base: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    make_adapter(base, tmp_path, 1)
    prompt, request = rng.integers(3, 300, 50).tolist(), LoRARequest("same", 1, str(tmp_path))
    with engine(base) as llm:
        first = llm.generate([prompt] * 2, PARAMS, use_tqdm=False, lora_request=request)
        assert llm.generate(prompt, PARAMS, use_tqdm=False, lora_request=request)[0].num_cached_tokens == 48
        change_tensors(tmp_path, lambda tensors: [tensor.mul_(-3) for tensor in tensors.values()])
        second = llm.generate(prompt, PARAMS, use_tqdm=False, lora_request=request)[0]
        assert second.num_cached_tokens == 0
    assert second.outputs[0].logprobs != first[0].outputs[0].logprobs


def test_files_that_change_before_they_are_read_again_end_only_their_request(base: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_adapter(base, tmp_path / name, ord(name))
    with engine(base, max_loras=1, max_cpu_loras=1) as llm:
        a, b = (llm._local._look_at(name, str(tmp_path / name)) for name in ("a", "b"))
        llm._local._adapters.find = {"a": a, "b": b}.get  # type: ignore[method-assign, assignment]
        assert llm.generate([1, 2], PARAMS, use_tqdm=False, lora_request="a")[0].outputs[0].token_ids  # type: ignore[arg-type]
        change_tensors(tmp_path / "b", lambda tensors: [tensor.mul_(2) for tensor in tensors.values()])
        failed = llm.submit([1, 2], PARAMS, lora_request="b")  # type: ignore[arg-type]
        good = llm.submit([1, 2], PARAMS, lora_request="a")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="the files of the adapter b have changed: load it again"):
            finish(llm, failed)
        finish(llm, good)
    assert len(good.outputs[0].token_ids) == PARAMS.max_tokens


def test_what_has_no_adapters_says_so(base: Path) -> None:
    with engine(base, enable_lora=False) as llm:
        with pytest.raises(InvalidRequest, match="lora_request needs LLM"):
            llm.generate([1], PARAMS, use_tqdm=False, lora_request=LoRARequest("a", 1, "/nowhere"))
        with pytest.raises(InvalidRequest, match="not a LoRARequest, but str"):
            llm.generate([1], PARAMS, use_tqdm=False, lora_request="a")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="--lora-modules needs --enable-lora"):
        engine(base, enable_lora=False, lora_modules=("a=b",))


def test_pages_on_disk_are_found_by_the_same_adapter_only(
    base: Path, tmp_path: Path, adapters: list[LoRARequest | None], rng: np.random.Generator
) -> None:
    prompt, (_, a, b, *_) = rng.integers(3, 300, 50).tolist(), adapters
    disk = {"kv_disk": str(tmp_path), "kv_disk_size": 64 << 20}
    with engine(base, **disk) as llm:
        expected = run(llm, [prompt], [a])
        while llm.stats().num_stored_tokens < 48:
            llm.step()
    with engine(base, **disk) as llm:
        for adapter, is_there in ((b, False), (None, False), (a, True)):
            (output,) = llm.generate(prompt, PARAMS, use_tqdm=False, lora_request=adapter)
            assert (output.num_cached_tokens == 48) == is_there
        assert (list(output.outputs[0].token_ids), output.outputs[0].logprobs) == expected[0]
