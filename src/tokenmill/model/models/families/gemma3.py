"""Gemma 3: norms of what blocks add, weights of norms as offsets from 1, GELU, and windows in five of six layers.

Layers with a window have a rope of their own. The models from 4B on have a vision tower beside them: the tokens of one
image see each other, in layers with a window as far back as it reaches.
EmbeddingGemma attends both ways; its windows reach half as far as their length, to either side.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec, SelfAttentionSpec
from tokenmill.model.models.attention_config import read_attention, with_windows
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_frame, read_norm, refuse
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GgufHeader, GgufTable
from tokenmill.model.models.layer_kinds import windows_but_every_sixth
from tokenmill.model.models.mlp_config import read_mlp
from tokenmill.model.models.rope_config import read_local_rope
from tokenmill.model.models.weight_names import LLAMA_NAMES

NAMES: Mapping[str, str] = MappingProxyType(
    {
        **LLAMA_NAMES,
        "attention_out_norm": "model.layers.{layer}.post_attention_layernorm",
        "mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm",
        "mlp_out_norm": "model.layers.{layer}.post_feedforward_layernorm",
    }
)
"""Names of layers whose blocks end with a norm."""


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    refuse(config, "attn_logit_softcapping", "final_logit_softcapping")
    frame, norm = read_frame(config, "full_attention"), read_norm(config, is_offset=True)
    attention = read_attention(config, frame.rope, biases=config.boolean("attention_bias", False))
    scale = config.number("query_pre_attn_scalar") ** -0.5
    attention = msgspec.structs.replace(attention, scale=scale, head_norm=norm, spans_see_ahead=True)
    windows = windows_but_every_sixth(config, frame.num_layers)
    attentions = with_windows(attention, windows, read_local_rope(config, 10000.0))
    is_encoder = config.boolean("use_bidirectional_attention", False)
    attentions = list(map(_both_ways, attentions)) if is_encoder else attentions
    mlp = read_mlp(config, activation="hidden_activation")
    found = decoder(
        config,
        [LayerSpec(one, mlp, norm, has_out_norms=True) for one in attentions],
        frame.max_position,
        embedding_multiplier=config.integer("hidden_size") ** 0.5,
        rounds_multiplier=True,
    )
    return msgspec.structs.replace(found, has_head=not is_encoder)


def _both_ways(attention: SelfAttentionSpec) -> SelfAttentionSpec:
    if attention.window is None:
        return msgspec.structs.replace(attention, ahead=None)
    reach = attention.window // 2
    return msgspec.structs.replace(attention, window=reach + 1, ahead=reach)


def _gguf_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scale of scores, which no key gives: from the heads, but for the 27B model, told by its depth."""
    is_27b = fields.get("num_hidden_layers") == 62
    size = fields["hidden_size"] // fields["num_attention_heads"] if is_27b else fields.get("head_dim")
    return {} if size is None else {"query_pre_attn_scalar": size}


def _embedding_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same of EmbeddingGemma, which attends both ways."""
    pattern = header.metadata.get("gemma-embedding.attention.sliding_window_pattern")
    both = {"use_bidirectional_attention": True, "is_causal": None}
    return {**_gguf_fields(header, fields), **both, **({"sliding_window_pattern": pattern} if pattern else {})}


_ALONE = Family(
    read=read,
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    weight_names=NAMES,
    gguf=GgufTable("gemma3", fields=_gguf_fields),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "Gemma3ForCausalLM": _ALONE,
        "Gemma3TextModel": msgspec.structs.replace(
            _ALONE, gguf=GgufTable("gemma-embedding", fields=_embedding_fields), other_weights=("lm_head.",)
        ),
        "Gemma3ForConditionalGeneration": msgspec.structs.replace(
            _ALONE,
            has_text_config=True,
            weight_names={role: f"language_model.{name}" for role, name in NAMES.items()},
            other_weights=("vision_tower.", "multi_modal_projector."),
            takes_images=True,
            gguf=None,
        ),
    }
)
