"""Single layers against transformers' or against the plain form of the same sum."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.kernels.torch_heads import rotate
from tokenmill.model.kernels.torch_kernels import TorchKernels, rms_norm
from tokenmill.model.models.architecture_config import read_architecture
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.moe import MoE
from tokenmill.model.models.rotary import rotary_tables
from tokenmill.model.models.targets import TargetScope
from tokenmill.model.models.weight_names import LLAMA_NAMES, WeightKey

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn untruncated": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "truncate": False,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
    },
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ROPES)
def test_rotation_equals_transformers(name: str, dtype: str, rng: np.random.Generator) -> None:
    config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=1024,
        rope_parameters={"rope_theta": 10000.0, **ROPES[name]},
    )
    fields = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    rotary = rotary_tables(read_architecture(fields).layers[0].attention.rope, 32, 1024, TorchKernels(dtype, "cpu"))
    positions = torch.from_numpy(rng.integers(0, 1024, 50))
    x = torch.randn(50, 4, 32).to(getattr(torch, dtype))

    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    want, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    got = rotate(x.clone(), rotary.lookup(positions))
    # An angle of 1000 radians is known to 6e-5 in float32, whichever way it is computed.
    tolerance = 1e-3 if dtype == "float32" else 0.03
    torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_equals_transformers_to_the_bit(dtype: torch.dtype, rng: np.random.Generator) -> None:
    size = int(rng.integers(1, 300))
    theirs = LlamaRMSNorm(size, eps=1e-5).to(dtype)
    theirs.weight.data.normal_()
    x = torch.randn(int(rng.integers(0, 9)), 3, size).to(dtype) * 3
    assert torch.equal(rms_norm(x, theirs.weight.data, 1e-5), theirs(x).detach())


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_what_is_added_is_multiplied_exactly_and_rounded_once(name: str, rng: np.random.Generator) -> None:
    dtype = getattr(torch, name)
    x, delta, weight = torch.randn(5, 90).to(dtype), torch.randn(5, 90).to(dtype), torch.randn(90).to(dtype)
    for scale in (1.0, 0.22, float(rng.uniform(0.1, 3))):
        summed = x.clone()
        got = TorchKernels(name, "cpu").add_rms_norm(summed, delta, weight, 1e-6, scale)
        want = (x.double() + scale * delta.double()).to(dtype)
        torch.testing.assert_close(summed, want, rtol=torch.finfo(dtype).eps, atol=1e-6)
        if dtype != torch.float32:  # float32's own rounding of the product rarely reaches a shorter type
            assert (summed != want).float().mean() < 0.01
        assert torch.equal(got, rms_norm(summed, weight, 1e-6))


def random_experts(spec: MoeSpec, hidden_size: int) -> MoE:
    moe = MoE(spec, hidden_size, TorchKernels("float32", "cpu"))
    for target in moe.targets(TargetScope(LLAMA_NAMES, 0)):
        target.fill(torch.randn(target.shape))
    return moe


@pytest.mark.parametrize("normalized", [True, False])
def test_grouped_experts_equal_the_sum_token_by_token(normalized: bool, rng: np.random.Generator) -> None:
    spec = MoeSpec(7, 3, 10, normalized)
    moe = random_experts(spec, 12)
    x = torch.randn(int(rng.integers(1, 20)), 12)
    want = torch.zeros_like(x)
    for token, row in enumerate(x):
        probabilities = torch.softmax(moe.router.weight.weight @ row, 0)
        chosen = probabilities.argsort(descending=True)[:3].tolist()
        total = sum(probabilities[expert] for expert in chosen) if normalized else 1.0
        for expert in chosen:
            gate, up = (moe.experts.gate_up[expert].weight @ row).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            want[token] += probabilities[expert] / total * (moe.experts.down[expert].weight @ inner)
    torch.testing.assert_close(moe.forward(x), want, rtol=1e-4, atol=1e-4)


def test_a_tokens_experts_do_not_depend_on_other_tokens(rng: np.random.Generator) -> None:
    moe = random_experts(MoeSpec(5, 2, 8, True), 16)
    x = torch.randn(9, 16)
    order = torch.from_numpy(rng.permutation(9))
    torch.testing.assert_close(moe.forward(x[order]), moe.forward(x)[order], rtol=1e-5, atol=1e-5)


def test_a_table_says_what_the_weights_are_called() -> None:
    fields = {**transformers.Qwen2Config(num_hidden_layers=2).to_dict(), "architectures": ["Qwen2ForCausalLM"]}
    names = {**LLAMA_NAMES, "q": "h.{layer}.query", "head": "output"}
    architecture = msgspec.structs.replace(read_architecture(fields), weight_names=names)
    targets = {target.name: target for target in Decoder(architecture, TorchKernels("float32", "meta")).targets()}
    assert targets["h.1.query.weight"].key == WeightKey("q", 1)
    assert targets["h.0.query.bias"].key == WeightKey("q", 0, kind="bias")
    assert targets["output.weight"].shape == (architecture.vocab_size, architecture.hidden_size)
    assert not [name for name in targets if "q_proj" in name or "lm_head" in name]
