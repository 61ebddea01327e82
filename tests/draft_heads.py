"""Random EAGLE-3 heads in the forms of vLLM, SGLang and speculators. Written without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Tensor = npt.NDArray[Any]
FORMS = ("vllm", "sglang", "speculators")
NAMES = {"vllm": "LlamaForCausalLMEagle3", "sglang": "Eagle3LlamaForCausalLM", "speculators": "Eagle3Speculator"}


@dataclass(frozen=True)
class HeadShape:
    """The shape and form of a random head."""

    form: str = "vllm"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 48
    num_draft_tokens: int | None = None
    boundaries: tuple[int, ...] | None = None
    has_embedding: bool = False
    has_head: bool = True
    max_position: int = 512
    flags: Mapping[str, Any] = field(default_factory=dict)


def make_head(folder: Path, target: Path, shape: HeadShape, seed: int) -> Path:
    """Write a random head for a model's folder; return the head's folder."""
    own = json.loads((target / "config.json").read_text())
    hidden, vocab, draws = own["hidden_size"], own["vocab_size"], np.random.default_rng(seed)
    num_drafts = shape.num_draft_tokens or vocab
    layer = "layers.0" if shape.form == "speculators" else "midlayer"

    def normal(*size: int) -> Tensor:
        return (draws.standard_normal(size) * size[-1] ** -0.5).astype(np.float32)

    def norm(size: int) -> Tensor:
        return (1 + 0.2 * draws.standard_normal(size)).astype(np.float32)

    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    num_taps = len(shape.boundaries or (0, 0, 0))
    tensors: dict[str, Tensor] = {
        "fc.weight": normal(hidden, num_taps * hidden),
        f"{layer}.self_attn.q_proj.weight": np.float32(1.5) * normal(heads, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": np.float32(1.5) * normal(kv, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": normal(kv, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": normal(hidden, heads),
        f"{layer}.mlp.gate_proj.weight": normal(shape.intermediate_size, hidden),
        f"{layer}.mlp.up_proj.weight": normal(shape.intermediate_size, hidden),
        f"{layer}.mlp.down_proj.weight": normal(hidden, shape.intermediate_size),
        f"{layer}.input_layernorm.weight": norm(hidden),
        f"{layer}.hidden_norm.weight": norm(hidden),
        f"{layer}.post_attention_layernorm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    if shape.has_head:
        tensors["lm_head.weight"] = normal(num_drafts, hidden)
    if shape.has_embedding:
        tensors["embed_tokens.weight"] = normal(vocab, hidden)
    if shape.flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(num_taps * hidden)
    if shape.flags.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": norm(hidden) for index in range(num_taps)}
    if num_drafts < vocab:
        chosen = np.sort(draws.permutation(vocab)[:num_drafts])
        tensors["d2t"] = chosen - np.arange(num_drafts)
        tensors["t2d"] = np.isin(np.arange(vocab), chosen)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(own, shape, num_drafts)))
    return folder


def _config(own: Mapping[str, Any], shape: HeadShape, num_drafts: int) -> dict[str, Any]:
    layer = {
        "hidden_size": own["hidden_size"],
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": own["vocab_size"],
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "eos_token_id": 100_000,
        "tie_word_embeddings": True,
    }
    config: dict[str, Any] = {"architectures": [NAMES[shape.form]], "draft_vocab_size": num_drafts, **shape.flags}
    if shape.form == "speculators":
        config |= {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    else:
        config |= layer
    if shape.boundaries is not None and shape.form == "sglang":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(shape.boundaries)}
    elif shape.boundaries is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(shape.boundaries)
    return config
