"""Families with recurrences: published sizes, the text half, and what a state does to prefixes and preemptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import greedy_continuation, load_oracle, make_checkpoint, randomize, smallest_margin
from tests.model.models.test_logits import assert_close, load
from tests.paging import PagedRequests, make_attention
from tests.tiers import pairs
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.lab.simulate.replay import replay
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.models.architecture_config import read_architecture

FAMILIES = ("lfm2", "lfm2_moe", "granite_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next")
# As published with LFM2-1.2B, Qwen3.5-0.8B and Qwen3-Next-80B-A3B, without unread fields.
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "tie_embedding": True,
    "vocab_size": 65536,
}
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "full_attention_interval": 4,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": True,
}
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}
# Not published with these fields alone: the defaults of transformers' class, which counts as many parameters.
QWEN3_5_MOE: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {"model_type": "qwen3_5_moe_text"},
}
LFM2_MOE: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "num_hidden_layers": 24,
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
}
# As published with granite-4.0-h-tiny, without unread fields.
GRANITE_HYBRID: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12,
    "hidden_size": 1536,
    "intermediate_size": 512,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "logits_scaling": 6,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 48,
    "max_position_embeddings": 131072,
    "num_attention_heads": 12,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 40,
    "num_key_value_heads": 4,
    "num_local_experts": 64,
    "position_embedding_type": "nope",
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "shared_intermediate_size": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}
ORACLES = {
    "lfm2": (LFM2, transformers.Lfm2Config, transformers.Lfm2ForCausalLM),
    "lfm2_moe": (LFM2_MOE, transformers.Lfm2MoeConfig, transformers.Lfm2MoeForCausalLM),
    "granite_hybrid": (
        GRANITE_HYBRID,
        transformers.GraniteMoeHybridConfig,
        transformers.GraniteMoeHybridForCausalLM,
    ),
    "qwen3_5": (QWEN3_5, transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "qwen3_5_moe": (QWEN3_5_MOE, transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    "qwen3_next": (QWEN3_NEXT, transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_published_configs_have_the_sizes_of_transformers(family: str) -> None:
    config, config_class, model_class = ORACLES[family]
    fields = config.get("text_config", config)
    with torch.device("meta"):
        model = model_class(config_class(**fields))
    architecture = read_architecture(config)
    assert architecture.num_parameters() == model.num_parameters()
    has_attention = [layer.attention is not None for layer in architecture.layers]
    assert has_attention == [kind == "full_attention" for kind in model.config.layer_types]


def test_bytes_of_a_state() -> None:
    # 10 convolutions of 2,048 channels and 2 tokens; 18 layers with 16 matrices of 128 x 128 in float32 and 6,144
    # channels of 3 tokens.
    assert read_architecture(LFM2).state_bytes(2) == 10 * 2048 * 2 * 2
    assert read_architecture(QWEN3_5).state_bytes(2) == 18 * (16 * 128 * 128 * 4 + 6144 * 3 * 2)
    assert read_architecture(QWEN3_5).kv_bytes_per_token(2) == 6 * 2 * 2 * 256 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of 48 names"),
        ({"layer_types": ["mamba"] * 48}, "layer_types has 'mamba'; supported: full_attention, linear_attention"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads (24) must be a multiple of linear_num_key_heads (16)"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be at least 2"),
        ({"num_experts_per_tok": 513}, "num_experts_per_tok (513) must not exceed num_experts (512)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidCheckpoint) as raised:
        read_architecture({**QWEN3_NEXT, **change})
    assert message in str(raised.value)


def test_yarn_reaches_further_than_the_pretraining_context() -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0, "original_max_position_embeddings": 262144}
    assert read_architecture({**QWEN3_NEXT, "rope_parameters": scaling}).max_position == 1 << 20


def test_the_text_half_of_a_model_with_a_tower(tmp_path: Path, rng: np.random.Generator) -> None:
    text = {
        "vocab_size": 331,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
    oracle = transformers.Qwen3_5ForConditionalGeneration(
        transformers.Qwen3_5Config(text_config=text, vision_config=tower)
    ).eval()
    randomize(oracle, int(rng.integers(2**31)))
    oracle.save_pretrained(tmp_path)
    sequence = rng.integers(0, 331, 40).tolist()
    with torch.inference_mode():
        want = oracle(torch.tensor([sequence])).logits[0]
    decoder, requests = load(tmp_path), PagedRequests([sequence], 16, rng)
    attention = make_attention("reference", decoder.attention_spec, requests.num_pages, 16, torch.float32)
    (got,) = requests.run(decoder, attention, [[(0, 25)], [(0, 15)]])
    assert_close(got, want)


@pytest.mark.parametrize(("family", "overlap"), pairs(FAMILIES, [False, True]))
def test_greedy_tokens_are_those_of_transformers_however_steps_are_cut(
    family: str, overlap: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_checkpoint(tmp_path, family, seed=int(rng.integers(2**31)))
    oracle = load_oracle(folder)
    prompts = [rng.integers(0, 300, int(length)).tolist() for length in rng.integers(1, 60, 5)]
    prompts.append([*prompts[0][:30], *rng.integers(0, 300, 9).tolist()])
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    expected = [greedy_continuation(oracle, prompt, 16) for prompt in prompts]
    # Few pages and states, so that requests are preempted; prompts come again, so that their states are found.
    options = {"dtype": "float32", "num_pages": 24, "page_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    size = read_architecture(_config(folder)).state_bytes(4)
    with LLM(folder, **options, state_memory=7 * size, async_scheduling=overlap, max_model_len=90) as llm:
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            for prompt, output, tokens in zip(prompts, outputs, expected, strict=True):
                if smallest_margin(oracle, prompt, tokens) > 1e-4:
                    assert list(output.outputs[0].token_ids) == tokens


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_session_goes_on_from_its_state(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path, family, seed=int(rng.integers(2**31)))
    oracle = load_oracle(folder)
    turns = [rng.integers(0, 300, int(length)).tolist() for length in rng.integers(1, 30, 3)]
    params = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
    with LLM(folder, dtype="float32", max_num_seqs=2, max_model_len=256, num_pages=64) as llm:
        session, seen = llm.session(), []
        for turn in turns:
            seen += turn
            told = list(session.send(turn, params).token_ids)
            expected = greedy_continuation(oracle, seen, 7)
            if smallest_margin(oracle, seen, expected) > 1e-4:
                assert told == expected
            seen += told[:-1]


@pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")
@pytest.mark.parametrize("family", FAMILIES)
def test_native_bits_do_not_depend_on_steps_states_and_preemptions(
    family: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    folder = make_checkpoint(tmp_path, family, seed=int(rng.integers(2**31)), head_dim=32, hidden_size=64)
    prompts = [rng.integers(0, 300, int(length)).tolist() for length in rng.integers(1, 60, 5)]
    prompts.append([*prompts[0][:30], *rng.integers(0, 300, 9).tolist()])
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    size = read_architecture(_config(folder)).state_bytes(2)
    roomy = {"num_pages": 100, "max_num_batched_tokens": 512, "max_num_seqs": 6, "enable_prefix_caching": False}
    tight = {"num_pages": 12, "max_num_batched_tokens": 16, "max_num_seqs": 4, "state_memory": 7 * size}
    found = []
    for given, threads in ((roomy, 1), (tight, 2)):
        options = {**given, "page_size": 16, "max_model_len": 90, "num_threads": threads, "kernels": "native"}
        with LLM(folder, dtype="bfloat16", **options) as llm:
            for _ in range(2):
                outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
                found.append([(one.token_ids, one.logprobs) for output in outputs for one in output.outputs])
    assert all(again == found[0] for again in found[1:])


def test_what_does_not_go_with_states_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "lfm2")
    refused = {
        "kv_source": ("tests.engine.transfer.fake_source:FakeSource",),
        "enable_lora": True,
        "tensor_parallel_size": 2,
        "state_memory": 100,
    }
    for field, value in refused.items():
        with pytest.raises(InvalidConfig):
            LLM(folder, dtype="float32", num_pages=16, max_model_len=64, **{field: value})


def test_sizes_that_native_kernels_do_not_have_are_refused_at_start(tmp_path: Path) -> None:
    for number, odd in enumerate(({"linear_value_head_dim": 24}, {"linear_conv_kernel_dim": 9})):
        folder = make_checkpoint(tmp_path / str(number), "qwen3_5", dtype=torch.bfloat16, **odd)
        options = {"num_pages": 16, "max_model_len": 64}
        with LLM(folder, kernels="torch", **options) as llm:
            assert llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)
        if load_kernels(1) is not None:
            with pytest.raises(InvalidConfig, match=r"native kernels have no .* use --kernels torch"):
                LLM(folder, **options)


def test_a_log_with_states_is_replayed_without_the_model(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path, "lfm2")
    shared = rng.integers(0, 300, 50).tolist()
    prompts = [shared[: int(rng.integers(20, 50))] + rng.integers(0, 300, 9).tolist() for _ in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    options = {"num_pages": 14, "page_size": 8, "max_num_seqs": 3, "max_model_len": 104}
    with LLM(folder, dtype="float32", max_num_batched_tokens=16, step_log=str(tmp_path / "log"), **options) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    assert stats.num_preemptions > 0 and stats.num_state_hits > 0, "the log has what it should have"
    outcome = replay(tmp_path / "log")
    assert outcome.difference is None
    assert outcome.num_plans > 50
