"""gpt-oss: the published size, and greedy tokens of whole engines, with experts in four bits too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints import greedy_continuation, load_oracle, make_checkpoint, smallest_margin
from tests.model.weights.test_stacked_experts import packed
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.models.architecture_config import read_architecture

# As published with gpt-oss-20b, without unread fields.
SMALL: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def test_the_published_config_has_the_size_of_transformers() -> None:
    fields = {name: value for name, value in SMALL.items() if name != "quantization_config"}
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**fields))
    assert read_architecture(SMALL).num_parameters() == model.num_parameters()
    for change in ({"swiglu_limit": 5.0}, {"swiglu_alpha": 1.5}, {"hidden_act": "gelu"}):
        with pytest.raises(InvalidCheckpoint, match="is not supported"):
            read_architecture({**SMALL, **change})


def prompts_of(rng: np.random.Generator) -> list[list[int]]:
    return [rng.integers(0, 300, int(length)).tolist() for length in rng.integers(1, 60, 6)]


def generated(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_greedy_tokens_are_those_of_transformers_however_steps_are_cut(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    folder, prompts = make_checkpoint(tmp_path, "gpt_oss", seed=int(rng.integers(2**31))), prompts_of(rng)
    oracle = load_oracle(folder)
    expected = [greedy_continuation(oracle, prompt, 20) for prompt in prompts]
    with LLM(folder, dtype="float32", num_pages=24, page_size=4, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        for _ in range(2):
            for prompt, tokens, wanted in zip(prompts, generated(llm, prompts), expected, strict=True):
                if smallest_margin(oracle, prompt, wanted) > 1e-4:
                    assert tokens == wanted


@pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")
def test_experts_of_four_bits_are_kept_and_give_the_same_tokens_in_any_batch(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    folder, prompts = make_checkpoint(tmp_path, "gpt_oss", dtype=torch.bfloat16), prompts_of(rng)
    packed(folder, rng)
    options: dict[str, Any] = {"dtype": "bfloat16", "num_pages": 24, "max_num_seqs": 4}
    with pytest.raises(InvalidConfig, match="is quantized already"):
        LLM(folder, quantization="int8", **options)
    with LLM(folder, max_num_batched_tokens=16, **options) as llm:
        together = generated(llm, prompts)
        # Of each 32 numbers 17 bytes, and a little padding.
        experts = 3 * 6 * (3 * 64 * 64) * 17 / 32
        assert llm.info.weight_bytes < 4 * 331 * 64 + 3 * 2 * 64 * 64 * 4 * 2 + 1.3 * experts + 200_000
    with LLM(folder, max_num_batched_tokens=2048, **options) as llm:
        assert [generated(llm, [prompt])[0] for prompt in prompts] == together


def test_backends_without_sinks_say_so() -> None:
    from tokenmill.model.attention.protocol import AttentionSpec
    from tokenmill.model.attention.registry import BACKENDS, AttentionConfig
    from tokenmill.platform.cpu import CpuPlatform

    config = AttentionConfig(AttentionSpec(1, 4, 2, 16, has_sinks=True), 16, "bfloat16", CpuPlatform())
    for backend in BACKENDS:
        if backend.name == "flash":
            assert backend.why_not(config) == "it has no sinks, which this model's attention has"
