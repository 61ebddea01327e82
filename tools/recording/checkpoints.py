"""The models that recordings are made with: tiny random checkpoints of every family and every stored format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from tests.checkpoints import make_checkpoint
from tests.model.weights.gguf_writer import write_gguf
from tests.model.weights.quantized_layouts import CASES, quantize

SEED = 14
# Heads of 16 so that the native attention takes them; rows of 64 so that every quantization's groups fit.
BASE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 512}


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **fields}}


LLAMA3 = _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
# GQA of every ratio, tied and untied embeddings, biases, windows, scaled rotary positions, dense layers among experts.
FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "llama": ("llama", {**LLAMA3}),
        "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, **_rope("linear")}),
        "mistral": ("mistral", {"num_key_value_heads": 1, "sliding_window": 24, "vocab_size": 301}),
        "qwen2": ("qwen2", {"num_key_value_heads": 4, "vocab_size": 277}),
        "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        "qwen3": ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 1, "tie_word_embeddings": True}),
        "qwen3-yarn": ("qwen3", {**_rope("yarn", original_max_position_embeddings=64)}),
        "moe": ("qwen3_moe", {"norm_topk_prob": True, "moe_intermediate_size": 32}),
        "moe-mixed": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1], "moe_intermediate_size": 32}),
    }
)
GGUF_KINDS = (None, "F16", "BF16", "Q8_0", "Q4_0")


def _of_family(name: str) -> Callable[[Path], Path]:
    family, shape = FAMILIES[name]
    return lambda folder: make_checkpoint(folder, family, seed=SEED, **{**BASE, **shape})


def _stored(case: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        make_checkpoint(folder, "qwen3", seed=SEED, **BASE | {"intermediate_size": 64})
        quantize(folder, *CASES[case], np.random.default_rng(SEED))
        return folder

    return make


def _gguf(family: str, kind: str | None) -> Callable[[Path], Path]:
    return lambda folder: write_gguf(
        make_checkpoint(folder, family, seed=SEED, **GGUF_SHAPES.get(family, BASE)), family, kind
    )


GGUF_SHAPES = {"qwen3_moe": BASE | {"moe_intermediate_size": 32, "norm_topk_prob": True}}
STORED = MappingProxyType(
    {case.replace(" ", "-"): _stored(case) for case in CASES}
    | {
        f"gguf-{family}-{kind or 'F32'}": _gguf(family, kind)
        for family in ("llama", "qwen2", "qwen3")
        for kind in GGUF_KINDS
    }
    | {f"gguf-qwen3_moe-{kind or 'F32'}": _gguf("qwen3_moe", kind) for kind in (None, "Q8_0")}
)
MODELS = MappingProxyType({name: _of_family(name) for name in FAMILIES} | dict(STORED))


def digest(model: Path) -> str:
    """Of the weights and the config; recordings of different checkpoints tell nothing about the code."""
    files = [model] if model.is_file() else [*sorted(model.glob("*.safetensors")), model / "config.json"]
    content = hashlib.sha256()
    for file in files:
        content.update(file.read_bytes())
    return content.hexdigest()
