"""Gemma 4: heads of two sizes, capped logits; small models have embeddings for each layer, and KV that is read again.

In the larger ones the values of layers that attend to all are their keys, and the tokens of one image see each other in
layers with a window. In the 26B-A4B experts stand beside each layer's feed-forward block.
Per-layer embeddings are `models.per_layer`. The tower for sound is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec, PerLayerSpec, SelfAttentionSpec
from tokenmill.model.architecture.mlp_spec import ExpertStack, MlpSpec, MoeSpec
from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.architecture.rope_spec import ProportionalScaling, RopeSpec
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_depth, read_norm, refuse
from tokenmill.model.models.families import gemma3
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GGUF_NAMES, GgufHeader, GgufTable
from tokenmill.model.models.layer_kinds import windows_but_every_sixth
from tokenmill.model.models.mlp_config import MOST_EXPERTS
from tokenmill.model.models.rope_config import rope_part
from tokenmill.model.models.weight_names import beside_a_tower, stack_beside_a_tower

NAMES: Mapping[str, str] = MappingProxyType(
    {
        **gemma3.NAMES,
        "layer": "model.layers.{layer}",
        "per_layer_table": "model.embed_tokens_per_layer",
        "per_layer_projection": "model.per_layer_model_projection",
        "per_layer_norm": "model.per_layer_projection_norm",
        "per_layer_gate": "model.layers.{layer}.per_layer_input_gate",
        "per_layer_output": "model.layers.{layer}.per_layer_projection",
        "per_layer_out_norm": "model.layers.{layer}.post_per_layer_input_norm",
        "shared_out_norm": "model.layers.{layer}.post_feedforward_layernorm_1",
        "mixture": "model.layers.{layer}.router",
        "router": "model.layers.{layer}.router.proj",
        "expert_norm": "model.layers.{layer}.pre_feedforward_layernorm_2",
        "expert_out_norm": "model.layers.{layer}.post_feedforward_layernorm_2",
        "expert_gate": "model.layers.{layer}.experts.{expert}.gate_proj",
        "expert_up": "model.layers.{layer}.experts.{expert}.up_proj",
        "expert_down": "model.layers.{layer}.experts.{expert}.down_proj",
    }
)
STACK = ExpertStack("model.layers.{layer}.experts.gate_up_proj", "model.layers.{layer}.experts.down_proj")


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    if config.raw("use_bidirectional_attention") != "vision":
        refuse(config, "use_bidirectional_attention")
    num_layers, max_position = read_depth(config)
    has_cap = config.raw("final_logit_softcapping") is not None
    return decoder(
        config,
        _layers(config, num_layers),
        max_position,
        embedding_multiplier=config.integer("hidden_size") ** 0.5,
        rounds_multiplier=True,
        logits_cap=config.number("final_logit_softcapping") if has_cap else None,
        per_layer=_per_layer(config),
    )


def _layers(config: ConfigReader, num_layers: int) -> list[LayerSpec]:
    windows = (*windows_but_every_sixth(config, num_layers)[:-1], None)  # the last one attends to all, whatever is said
    heads = [_heads(config, layer, window is None) for layer, window in enumerate(windows)]
    for is_full in (True, False):
        if len({one for one, window in zip(heads, windows, strict=True) if (window is None) == is_full}) > 1:
            raise config.error("per_layer_config: layers of one type must have heads of one shape")
    norm, biases = read_norm(config), config.boolean("attention_bias", False)
    sources = _sources(config, windows)
    ropes = {True: _full_rope(config), False: _rope(config, "sliding_attention", 10000.0, "default")[0]}
    if config.raw("hidden_activation") != "gelu_pytorch_tanh":
        raise config.error(f"hidden_activation {config.raw('hidden_activation')!r} is not supported")
    values_are_keys = config.boolean("attention_k_eq_v", False)
    spans_see_ahead = config.raw("use_bidirectional_attention") == "vision"
    return [
        LayerSpec(
            SelfAttentionSpec(
                num_heads=config.integer("num_attention_heads"),
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scale=1.0,
                rope=ropes[window is None],
                window=window,
                head_norm=norm,
                qkv_bias=biases,
                output_bias=biases,
                norms_values=True,
                kv_from=source,
                values_are_keys=values_are_keys and window is None,
                spans_see_ahead=spans_see_ahead and window is not None,
            ),
            _mlp(config, norm, source),
            norm,
            has_out_norms=True,
            per_layer_size=config.integer("hidden_size_per_layer_input", low=0),
            has_scalar=True,
        )
        for (num_kv_heads, head_dim), window, source in zip(heads, windows, sources, strict=True)
    ]


def _mlp(config: ConfigReader, norm: NormSpec, source: int | None) -> MlpSpec | MoeSpec:
    """Read the feed-forward block of a layer; `source`: the layer whose KV it reads, if it has none of its own."""
    is_wide = source is not None and config.boolean("use_double_wide_mlp", False)
    size = config.integer("intermediate_size") * (2 if is_wide else 1)
    if not config.boolean("enable_moe_block", False):
        return MlpSpec(size, activation="gelu")
    num_experts, chosen = config.integer("num_experts", high=MOST_EXPERTS), config.integer("top_k_experts")
    if num_experts < chosen:
        raise config.error(f"top_k_experts ({chosen}) must not exceed num_experts ({num_experts})")
    return MoeSpec(
        num_experts,
        chosen,
        config.integer("moe_intermediate_size"),
        norm_topk_prob=True,
        activation="gelu",
        shared_size=size,
        has_shared_gate=False,
        norm=norm,
        has_scales=True,
    )


def _per_layer(config: ConfigReader) -> PerLayerSpec | None:
    """Read the per-layer embeddings; None: the model has no such."""
    size = config.integer("hidden_size_per_layer_input", low=0)
    if not size:
        return None
    if config.has("gguf_architecture"):
        raise config.error("per-layer embeddings (E2B, E4B) are not read from GGUF files; serve the safetensors")
    vocab_size = config.integer("vocab_size_per_layer_input")
    if vocab_size < config.integer("vocab_size"):
        raise config.error(f"vocab_size_per_layer_input ({vocab_size}) must not be below vocab_size")
    return PerLayerSpec(size, vocab_size)


def _heads(config: ConfigReader, layer: int, is_full: bool) -> tuple[int, int]:
    """Read KV heads and head sizes: by type of layer (published configs), or by layer (saved by transformers 5)."""
    head_dim, num_kv_heads = config.integer("head_dim"), config.integer("num_key_value_heads")
    said = config.raw("per_layer_config")
    if said is None:
        head_dim = config.integer("global_head_dim", 512) if is_full else head_dim
        if is_full and config.boolean("attention_k_eq_v", False):
            num_kv_heads = config.integer("num_global_key_value_heads", num_kv_heads)
    elif not isinstance(said, dict) or not isinstance(said.get(str(layer), {}), dict):
        raise config.error("per_layer_config must be an object of objects")
    else:
        own = said.get(str(layer), {})
        if unknown := own.keys() - {"head_dim", "num_key_value_heads"}:
            raise config.error(f"per_layer_config: {min(unknown)} is not supported")
        of_layer = ConfigReader(own, f"{config.source}: per_layer_config")
        head_dim = of_layer.integer("head_dim", head_dim)
        num_kv_heads = of_layer.integer("num_key_value_heads", num_kv_heads)
    num_heads = config.integer("num_attention_heads")
    if num_heads % num_kv_heads:
        raise config.error(f"num_attention_heads ({num_heads}) must be a multiple of {num_kv_heads} KV heads")
    if head_dim % 2:
        raise config.error(f"head_dim must be even, got {head_dim}")
    return num_kv_heads, head_dim


def _sources(config: ConfigReader, windows: tuple[int | None, ...]) -> list[int | None]:
    """Return for each layer the layer whose KV it reads, the last one of its type with KV of its own; None: its own."""
    first = max(0, len(windows) - config.integer("num_kv_shared_layers", 0, low=0))
    sources: list[int | None] = [None] * len(windows)
    for layer in range(first, len(windows)):
        alike = [other for other in range(first) if (windows[other] is None) == (windows[layer] is None)]
        if not alike:
            raise config.error("num_kv_shared_layers leaves no layer of a type that has KV of its own")
        sources[layer] = alike[-1]
    return sources


def _rope(config: ConfigReader, layer_type: str, theta: float, kind: str) -> tuple[RopeSpec, ConfigReader]:
    """Read the plain rope of a type of layers; return it with the config object that describes it."""
    part = rope_part(config, "rope_parameters", layer_type)
    if part.raw("rope_type", kind) != kind:
        raise part.error(f"rope_type {part.raw('rope_type')!r} is not supported; supported: {kind}")
    return RopeSpec(part.number("rope_theta", theta)), part


def _full_rope(config: ConfigReader) -> RopeSpec:
    plain, part = _rope(config, "full_attention", 1000000.0, "proportional")
    share = part.number("partial_rotary_factor", 0.25 if config.raw("rope_parameters") is None else 1.0)
    if share > 1.0:
        raise part.error(f"partial_rotary_factor {share:g} is not supported")
    return RopeSpec(plain.theta, ProportionalScaling(share, part.number("factor", 1.0)))


def _gguf_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return heads by layer, both ropes, the experts, and whether values are keys: then full layers have no values."""

    def said(key: str) -> Any:
        return header.metadata.get(f"gemma4.{key}")

    windows = list(said("attention.sliding_window_pattern") or ())
    heads = fields.get("num_key_value_heads")
    heads = list(heads) if isinstance(heads, list) else [heads] * len(windows)
    full = [layer for layer, has_window in enumerate(windows) if not has_window]
    own = {str(layer): {"head_dim": fields.get("head_dim"), "num_key_value_heads": heads[layer]} for layer in full}
    factors = header.floats("rope_freqs.weight") or [1.0]
    turning = {"partial_rotary_factor": sum(factor == 1.0 for factor in factors) / len(factors)}
    return {
        "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in windows],
        "head_dim": said("attention.key_length_swa"),
        "num_key_value_heads": next((heads[layer] for layer in range(len(windows)) if windows[layer]), None),
        "per_layer_config": own,
        "attention_k_eq_v": bool(full) and f"blk.{full[0]}.attn_v.weight" not in header.tensors,
        "num_kv_shared_layers": said("attention.shared_kv_layers") or 0,
        "hidden_size_per_layer_input": said("embedding_length_per_layer_input") or 0,
        "final_logit_softcapping": said("final_logit_softcapping"),
        "enable_moe_block": bool(fields.get("num_experts")),
        "top_k_experts": fields.get("num_experts_per_tok"),
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": fields.get("rope_theta"), **turning},
            "sliding_attention": {"rope_type": "default", "rope_theta": fields.get("rope_local_base_freq", 10000.0)},
        },
    }


GGUF: Mapping[str, str] = MappingProxyType(
    {
        **GGUF_NAMES,
        "layer": "blk.{layer}",
        "shared_out_norm": "blk.{layer}.post_ffw_norm_1",
        "mixture": "blk.{layer}.ffn_gate_inp",
        "expert_norm": "blk.{layer}.pre_ffw_norm_2",
        "expert_out_norm": "blk.{layer}.post_ffw_norm_2",
    }
)
"""Role of a weight -> its name in a GGUF file."""
_ALONE = Family(
    read=read,
    defaults={
        "vocab_size": 262144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    weight_names=NAMES,
    expert_stack=STACK,
    gguf=GgufTable(
        "gemma4",
        GGUF,
        kinds={"layer_scalar": "layer_output_scale.weight", "per_expert_scale": "ffn_down_exps.scale"},
        fields=_gguf_fields,
        joined=dict.fromkeys(("expert_gate", "expert_up"), "blk.{layer}.ffn_gate_up_exps"),
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Gemma4ForCausalLM": _ALONE,
        "Gemma4ForConditionalGeneration": msgspec.structs.replace(
            _ALONE,
            has_text_config=True,
            gguf=None,
            weight_names=beside_a_tower(NAMES),
            expert_stack=stack_beside_a_tower(STACK),
            other_weights=("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio."),
            takes_images=True,
        ),
    }
)
