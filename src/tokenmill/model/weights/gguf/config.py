"""Translate a GGUF file's metadata into the terms of Hugging Face's config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.model.models.families import FAMILIES
from tokenmill.model.weights.gguf.file import GgufFile
from tokenmill.model.weights.gguf.types import FILE_TYPES

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        kind: name
        for name, family in FAMILIES.items()
        if family.gguf is not None
        for kind in (family.gguf.name, *family.gguf.more_names)
    }
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
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "max_position_embeddings": "context_length",
        "rope_theta": "rope.freq_base",
        "rope_local_base_freq": "rope.freq_base_swa",
        "sliding_window": "attention.sliding_window",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
)
ROPE_FACTORS = "rope_freqs.weight"
# Layers behind pooled states, in their order.
LAYERS = ("dense_2", "dense_3", "cls", "cls.norm", "cls.output")


def takes_tower(metadata: Mapping[str, Any]) -> bool:
    """Return True for a model, by its file's metadata, that takes images if its vision tower lies beside it."""
    name = ARCHITECTURES.get(str(metadata.get("general.architecture")), "")
    table = FAMILIES[name].gguf if name else None
    return table is not None and bool(table.without_tower)


def config_of(file: GgufFile, has_tower: bool = False) -> dict[str, Any]:
    """Return the fields of config.json that the file's metadata amount to, without those of a tower.

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
    table = FAMILIES[ARCHITECTURES[kind]].gguf
    assert table is not None, "its name was found there"
    fields |= {
        "architectures": [table.without_tower if table.without_tower and not has_tower else ARCHITECTURES[kind]],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "gguf_architecture": kind,
        "gguf_file_type": _file_type(file),
        **{f"{name}_token_id": _token_id(file, name) for name in ("eos", "bos")},
        **_rope_scaling(file, kind),
        **_rope_factors(file),
        **_pooling(file, kind),
    }
    return {**fields, **table.fields(file, fields)}


def _file_type(file: GgufFile) -> str:
    """Return the name of a file's type; of a file that does not say it, the kind that most bytes are of."""
    number = file.metadata.get("general.file_type")
    if isinstance(number, int) and number in FILE_TYPES:
        return FILE_TYPES[number]
    num_bytes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        num_bytes[tensor.kind] += tensor.num_bytes
    return num_bytes.most_common(1)[0][0]


def _token_id(file: GgufFile, name: str) -> int | None:
    """Return the id of a special token; None: the file has none, or one outside its vocabulary."""
    number = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return number if number is not None and 0 <= number < file.tensors["token_embd.weight"].shape[0] else None


def _pooling(file: GgufFile, kind: str) -> dict[str, Any]:
    """Return how the states of a model that does not generate are pooled, and the names of its labels."""
    pooling = file.metadata.get(f"{kind}.pooling_type")
    if not pooling:  # 0: none
        return {}
    layers = [name for name in LAYERS if f"{name}.weight" in file.tensors]
    fields: dict[str, Any] = {"gguf_pooling": pooling, "gguf_layers": layers}
    labels = file.metadata.get(f"{kind}.classifier.output_labels")
    if labels:
        fields["id2label"] = {str(number): label for number, label in enumerate(labels)}
    if file.metadata.get(f"{kind}.attention.causal") is False:
        fields["is_causal"] = False
    return fields


def _rope_factors(file: GgufFile) -> dict[str, Any]:
    """Return a scaling whose factors stand in a tensor, for Llama 3's: each frequency is divided by its own."""
    factors = file.floats(ROPE_FACTORS)
    if factors is None:
        return {}
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
