"""Checkpoint folders for the check: a config.json, and seeded random weights where two devices must have the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.weights.checkpoint import read_architecture

_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False, "bos_token_id": None}

# As their publishers' config.json files say.
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QWEN3_14B = {
    **QWEN3_0_6B,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "tie_word_embeddings": False,
}
TINY = {
    **QWEN3_0_6B,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 277,
    "max_position_embeddings": 512,
}
# Small, and odd in what the kernels see: a group of 3 heads, windows, experts, a head size that fills no tile, layers
# without a rope, multipliers.
SMALL: dict[str, dict[str, Any]] = {
    "qwen3": {**TINY, "num_hidden_layers": 3, "num_attention_heads": 6, "head_dim": 80, "hidden_size": 256},
    "mistral": {
        **TINY,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 24,
        "num_hidden_layers": 2,
        "head_dim": 64,
    },
    "qwen3_moe": {
        **TINY,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 2,
    },
    "smollm3": {
        **TINY,
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layer_interval": 2,
        "num_hidden_layers": 2,
    },
    "granite": {
        **TINY,
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.6,
        "num_hidden_layers": 2,
    },
}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """A folder that `--load-format dummy` can serve."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **config, "eos_token_id": 0}))
    return folder


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int) -> Path:
    """A folder with random weights whose every value matters."""
    write_config(folder, config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for target in Decoder(read_architecture(folder), TorchKernels("float32", "meta")).targets():
        noise = torch.randn(target.shape, generator=generator)
        tensors[target.name] = noise / target.shape[-1] ** 0.5 if len(target.shape) > 1 else 1 + 0.2 * noise
    save_file(tensors, folder / "model.safetensors")
    return folder
