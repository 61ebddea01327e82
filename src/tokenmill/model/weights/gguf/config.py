"""Translate a GGUF file's metadata into the terms of Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.models.families import FAMILIES
from tokenmill.model.weights.gguf.file import GgufFile, GgufTensor

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {family.gguf: name for name, family in FAMILIES.items() if family.gguf is not None}
)
# Field of config.json -> key of the metadata, after the architecture's name.
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "max_position_embeddings": "context_length",
        "rope_theta": "rope.freq_base",
        "rope_local_base_freq": "rope.freq_base_swa",
        "sliding_window": "attention.sliding_window",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
)
ROPE_FACTORS = "rope_freqs.weight"
# The same, of the delta rule.
_DELTA_NET_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "linear_key_head_dim": "ssm.state_size",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "full_attention_interval": "full_attention_interval",
    }
)


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return the fields of config.json that the file's metadata amount to.

    Raises:
        InvalidCheckpoint: the architecture or its rotary scaling is not supported.
    """
    kind = str(file.metadata.get("general.architecture"))
    if kind not in ARCHITECTURES:
        raise InvalidCheckpoint(
            f"{file.path}: architecture {kind} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    fields = {name: file.metadata[f"{kind}.{key}"] for name, key in FIELDS.items() if f"{kind}.{key}" in file.metadata}
    tensors = file.tensors
    if "token_embd.weight" not in tensors:
        raise InvalidCheckpoint(f"{file.path} has no tensor token_embd.weight: it is not a language model")
    return {
        **fields,
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        **{f"{name}_token_id": _token_id(file, name) for name in ("eos", "bos")},
        **_rope_scaling(file, kind),
        **_rope_factors(file),
        **_OWN_FIELDS.get(kind, lambda file, fields: {})(file, fields),
    }


def _gemma3_fields(file: GgufFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scale of scores, which no key gives: from the heads, but for the 27B model, told by its depth."""
    is_27b = fields.get("num_hidden_layers") == 62
    size = fields["hidden_size"] // fields["num_attention_heads"] if is_27b else fields.get("head_dim")
    return {} if size is None else {"query_pre_attn_scalar": size}


def _gpt_oss_fields(file: GgufFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of gpt-oss: an expert's middle by its own name; unrounded ends of YaRN's ramp, which no key
    says."""
    scaling = _rope_scaling(file, "gpt-oss").get("rope_scaling")
    found = {"intermediate_size": fields["moe_intermediate_size"]} if "moe_intermediate_size" in fields else {}
    return {**found, **({"rope_scaling": {**scaling, "truncate": False}} if scaling else {})}


def _lfm2_fields(file: GgufFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of LFM2: layers with attention are those with KV heads; the width is the one that was adjusted."""
    heads = list(fields.get("num_key_value_heads", []))
    return {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "num_key_value_heads": int(max(heads, default=0)),
        "conv_L_cache": file.metadata.get("lfm2.shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": fields.get("rms_norm_eps"),
    }


def _qwen35_fields(file: GgufFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of Qwen3.5: the delta rule's by names of state spaces, and how much of a head turns."""
    sizes = {field: file.metadata.get(f"qwen35.{key}") for field, key in _DELTA_NET_FIELDS.items()}
    inner, heads = file.metadata.get("qwen35.ssm.inner_size"), sizes["linear_num_value_heads"]
    if inner and heads:
        sizes["linear_value_head_dim"] = inner // heads
    rotated, head_dim = file.metadata.get("qwen35.rope.dimension_count"), fields.get("head_dim")
    if rotated and head_dim:
        sizes["partial_rotary_factor"] = rotated / head_dim
    return {
        "num_hidden_layers": fields["num_hidden_layers"] - num_drafting_layers(file),
        **{field: size for field, size in sizes.items() if size is not None},
    }


def num_drafting_layers(file: GgufFile) -> int:
    """Return how many layers behind the model's own draft further tokens; they count among its blocks."""
    return int(file.metadata.get(f"{file.metadata.get('general.architecture')}.nextn_predict_layers", 0))


def _phi3_fields(file: GgufFile, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of Phi 3: LongRoPE's factors are tensors, and how much of a head turns is a number of its own."""
    found: dict[str, Any] = {}
    rotated, head_dim = file.metadata.get("phi3.rope.dimension_count"), fields.get("head_dim")
    if rotated and (head_dim or fields.get("num_attention_heads")):
        found["partial_rotary_factor"] = rotated / (head_dim or fields["hidden_size"] // fields["num_attention_heads"])
    factors = {kind: file.tensors.get(f"rope_factors_{kind}.weight") for kind in ("short", "long")}
    if any(factors.values()):
        scaling: dict[str, Any] = {"rope_type": "longrope"}
        scaling |= {f"{kind}_factor": _floats(tensor) for kind, tensor in factors.items() if tensor is not None}
        original = file.metadata.get("phi3.rope.scaling.original_context_length")
        attention = file.metadata.get("phi3.rope.scaling.attn_factor")
        found |= {"rope_scaling": scaling, "original_max_position_embeddings": original}
        scaling |= {} if attention is None else {"attention_factor": attention}
    return found


def _floats(tensor: GgufTensor) -> list[float]:
    return [float(one) for one in np.frombuffer(tensor.data().tobytes(), np.float32)]


_OWN_FIELDS = {
    "gemma3": _gemma3_fields,
    "gpt-oss": _gpt_oss_fields,
    "lfm2": _lfm2_fields,
    "qwen35": _qwen35_fields,
    "phi3": _phi3_fields,
}


def _token_id(file: GgufFile, name: str) -> int | None:
    """Return the id of a special token; None: the file has none, or one outside its vocabulary."""
    number = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return number if number is not None and 0 <= number < file.tensors["token_embd.weight"].shape[0] else None


def _rope_factors(file: GgufFile) -> dict[str, Any]:
    """Return a scaling whose factors stand in a tensor, for Llama 3's: each frequency is divided by its own."""
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return {}
    factors = _floats(tensor)
    scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return {"rope_scaling": scaling}


def _rope_scaling(file: GgufFile, kind: str) -> dict[str, Any]:
    scaling = file.metadata.get(f"{kind}.rope.scaling.type", "none")
    if scaling == "none":
        return {}
    if scaling not in ("linear", "yarn"):
        raise InvalidCheckpoint(f"{file.path}: rope scaling {scaling!r} is not supported; supported: linear, yarn")
    fields = {"rope_type": scaling, "factor": file.metadata.get(f"{kind}.rope.scaling.factor")}
    original = file.metadata.get(f"{kind}.rope.scaling.original_context_length")
    if original is not None:
        fields["original_max_position_embeddings"] = original
    return {"rope_scaling": fields}
