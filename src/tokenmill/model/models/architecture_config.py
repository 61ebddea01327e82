"""config.json -> `Architecture`, by the facts of its family; the reading is shared.

Written against the configs that transformers 4 and 5 save: version 5 has `rope_parameters` and `dtype` where version 4
has `rope_theta` with `rope_scaling` and `torch_dtype`. Opens no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tokenmill.model.architecture.architecture import (
    Architecture,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    SelfAttentionSpec,
)
from tokenmill.model.architecture.rope_spec import RopeSpec
from tokenmill.model.models import layer_kinds
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.families import FAMILIES, Family
from tokenmill.model.models.heads_config import check_rope, read_head_dim, read_heads
from tokenmill.model.models.rope_config import read_local_rope, read_rope

# Several times what any model has; laying out one with millions would take minutes.
MOST_LAYERS = 1024
MOST_EXPERTS = 4096
# Of the gate of a feed-forward block: what configs call it, and what it is in `MlpSpec`.
SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
# What `dtype` may say; "auto" says nothing.
FLOAT_FORMATS = ("float32", "float16", "bfloat16", "auto")
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}


def read_architecture(fields: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """Return the architecture that a config.json describes.

    Args:
        fields: the parsed file.
        source: its name in error messages, e.g. its path.

    Raises:
        InvalidCheckpoint: the architecture, a feature or a value is not supported; names the source and the field.
    """
    name = _architecture_name(fields, source)
    family = FAMILIES[name]
    if family.text_config and ("text_config" in fields or "hidden_size" not in fields):
        # What stands beside the decoder's config wins over what stands in it.
        fields = {**_part(fields, "text_config", source), **fields}
    config = ConfigReader(fields, source, family.defaults)
    for field in family.refused:
        if config.raw(field) not in (None, False):
            raise config.error(f"{field} {config.raw(field)!r} is not supported")
    has_local_rope = family.local_theta is not None
    max_position = config.integer("max_position_embeddings", 32768)
    layer_type = "full_attention" if has_local_rope else None
    num_layers = config.integer("num_hidden_layers", high=MOST_LAYERS)
    if family.reads_ropes is not None:
        layers = family.reads_ropes(config, num_layers)
    else:
        rope, max_position = read_rope(config, max_position, layer_type, family.may_rotate_partly)
        if family.layers is None and family.windows is layer_kinds.no_windows:
            layer_kinds.refuse_window(config, num_layers, max_position)
        layers = (family.layers or partial(_read_layers, family=family))(config, num_layers, rope)
    has_cap = family.caps_logits and config.raw("final_logit_softcapping") is not None
    vocab_size, hidden_size = config.integer("vocab_size"), config.integer("hidden_size")
    scale = hidden_size**0.5 if family.scales_embeddings else _multiplier(config, family, "embedding_multiplier")
    return Architecture(
        name=name,
        weight_names=family.weight_names,
        layers=layers,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        norm=_norm(config, family),
        max_position=max_position,
        tie_embeddings=config.boolean("tie_embedding", config.boolean("tie_word_embeddings", False)),
        embedding_multiplier=scale,
        rounds_multiplier=family.scales_embeddings,
        logits_scaling=_multiplier(config, family, "logits_scaling"),
        logits_cap=config.number("final_logit_softcapping") if has_cap else None,
        per_layer=None if family.per_layer is None else family.per_layer(config),
        bos_token_id=next(iter(config.integers("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(config, ConfigReader(fields, source), vocab_size),
        dtype=_dtype_name(config),
        takes_images=family.takes_images,
        other_weights=family.other_weights,
        stacks_experts=family.stacks_experts,
    )


def _part(fields: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    """Return an object in a config.

    Raises:
        InvalidCheckpoint: it is no object.
    """
    part = fields.get(name)
    if not isinstance(part, dict):
        raise ConfigReader(fields, source).error(f"{name} must be an object")
    return {key: value for key, value in part.items() if key != "architectures"}


def _architecture_name(fields: Mapping[str, Any], source: str) -> str:
    supported = ", ".join(sorted(FAMILIES))
    names = fields.get("architectures")
    config = ConfigReader(fields, source)
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.error(f"architectures must name the model's architecture; supported: {supported}")
    if names[0] not in FAMILIES:
        raise config.error(f"architecture {names[0]} is not supported; supported: {supported}")
    return names[0]


def _read_layers(config: ConfigReader, num_layers: int, rope: RopeSpec, family: Family) -> tuple[LayerSpec, ...]:
    num_heads, num_kv_heads = read_heads(config)
    head_dim = read_head_dim(config, num_heads, family.head_dim)
    check_rope(config, rope, head_dim)
    norm = _norm(config, family)
    local_rope = rope if family.local_theta is None else read_local_rope(config, family.local_theta)
    residual_multiplier = _multiplier(config, family, "residual_multiplier")
    attentions = [
        SelfAttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=_attention_scale(config, family, head_dim),
            rope=None if not has_rope else rope if window is None else local_rope,
            window=window,
            head_norm=norm if family.head_norms else None,
            qkv_bias=_fact(config, family.qkv_bias),
            output_bias=_fact(config, family.output_bias),
            has_sinks=family.has_sinks,
        )
        for window, has_rope in zip(
            family.windows(config, num_layers), family.has_rope(config, num_layers), strict=True
        )
    ]
    mlps = _read_mlps(config, family, num_layers)
    return tuple(
        LayerSpec(attention, mlp, norm, residual_multiplier, family.has_out_norms)
        for attention, mlp in zip(attentions, mlps, strict=True)
    )


def _attention_scale(config: ConfigReader, family: Family, head_dim: int) -> float:
    if family.has_multipliers:
        return _multiplier(config, family, "attention_multiplier")
    return (head_dim if family.query_scalar is None else config.number(family.query_scalar)) ** -0.5


def _read_mlps(config: ConfigReader, family: Family, num_layers: int) -> list[MlpSpec | MoeSpec]:
    field = family.activation
    activation = ACTIVATIONS.get(config.raw(field, "silu"))
    if activation is None or (family.has_experts and activation != "silu"):
        supported = "silu" if family.has_experts else ", ".join(ACTIVATIONS)
        raise config.error(f"{field} {config.raw(field)!r} is not supported; supported: {supported}")
    dense = MlpSpec(config.integer("intermediate_size"), _fact(config, family.mlp_bias), activation)
    if not family.has_experts:
        return [dense] * num_layers
    # transformers 5 saves `num_local_experts`, 4 saved `num_experts`.
    num_experts = config.integer("num_experts", config.raw("num_local_experts", 128), low=0, high=MOST_EXPERTS)
    step, only_dense = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    sparse = [layer for layer in range(num_layers) if layer not in only_dense and (layer + 1) % step == 0]
    if num_experts == 0 or not sparse:
        return [dense] * num_layers
    moe = _read_moe(config, family, num_experts)
    return [moe if layer in sparse else dense for layer in range(num_layers)]


def _read_moe(config: ConfigReader, family: Family, num_experts: int) -> MoeSpec:
    experts_per_token = config.integer("num_experts_per_tok", 8)
    if experts_per_token > num_experts:
        raise config.error(f"num_experts_per_tok ({experts_per_token}) must not exceed num_experts ({num_experts})")
    for field, only in SWIGLU.items() if family.experts.get("activation") == "clamped" else ():
        if config.number(field, only) != only:
            raise config.error(f"{field} {config.raw(field)!r} is not supported; supported: {only}")
    size_field = "intermediate_size" if family.stacks_experts else "moe_intermediate_size"
    found = {
        "size": config.integer(size_field, 768),
        "norm_topk_prob": config.boolean("norm_topk_prob", False),
        **family.experts,
    }
    return MoeSpec(num_experts, experts_per_token, **found)


def _fact(config: ConfigReader, fact: bool | str) -> bool:
    return config.boolean(fact, False) if isinstance(fact, str) else fact


def _multiplier(config: ConfigReader, family: Family, name: str) -> float:
    return config.number(name, 1.0) if family.has_multipliers else 1.0


def _norm(config: ConfigReader, family: Family) -> NormSpec:
    return NormSpec(config.number(family.norm_eps, 1e-6), family.norms_are_offsets)


def _eos_token_ids(config: ConfigReader, stated: ConfigReader, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text. The family's defaults may lie outside of a small vocabulary; stated ids may not.

    Args:
        stated: `config` without the family's defaults.
    """
    for token_id in stated.integers("eos_token_id"):
        if not 0 <= token_id < vocab_size:
            raise config.error(
                f"eos_token_id {token_id} is not in the vocabulary of {vocab_size} tokens; "
                "put the id of the token that ends a text"
            )
    return tuple(token_id for token_id in config.integers("eos_token_id") if token_id < vocab_size)


def _dtype_name(config: ConfigReader) -> str | None:
    """Return the name of the float format, and refuse an unknown one."""
    field = "torch_dtype" if config.raw("dtype") is None else "dtype"
    name = config.raw(field)
    if name is None or name in FLOAT_FORMATS:
        return name
    raise config.error(f"{field} {name!r} is not supported; supported: {', '.join(FLOAT_FORMATS)}")
