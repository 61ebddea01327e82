"""Whisper (Radford et al. 2022), the decoder: learned positions, LayerNorms, and attention to a clip in every layer.

The encoder stands beside it, as that of other models that take sound. Its positions are the first of a sequence, before
the text: so the keys and values of a clip lie in the request's pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec, SelfAttentionSpec
from tokenmill.model.architecture.input_spec import InputSpec, PositionSpec
from tokenmill.model.architecture.mlp_spec import MlpSpec
from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import MOST_LAYERS, decoder, refuse
from tokenmill.model.models.family import Family

_FIELDS: Mapping[str, str] = MappingProxyType({"d_model": "hidden_size"})
# What its code does not read from the config.
_EPS = 1e-5


def read(config: ConfigReader) -> Architecture:
    """Read the decoder; a context is the positions of a clip, and those of the text behind them."""
    config = config.without("num_hidden_layers", "num_attention_heads", "hidden_size").renamed(_FIELDS, {})
    refuse(config, "scale_embedding")
    if config.raw("activation_function", "gelu") != "gelu":
        raise config.error(f"activation_function {config.raw('activation_function')!r} is not supported")
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("decoder_attention_heads")
    if hidden_size % num_heads:
        raise config.error(f"d_model ({hidden_size}) must be a multiple of decoder_attention_heads ({num_heads})")
    positions, clip = config.integer("max_target_positions"), config.integer("max_source_positions")
    attention = SelfAttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        scale=(hidden_size // num_heads) ** -0.5,
        rope=None,
        qkv_bias=True,
        output_bias=True,
        has_key_bias=False,
        first_key=clip,
    )
    norm = NormSpec(_EPS, is_centered=True, has_bias=True)
    mlp = MlpSpec(config.integer("decoder_ffn_dim"), True, "gelu_erf", is_gated=False)
    layers = [LayerSpec(attention, mlp, norm, crosses=True)] * config.integer("decoder_layers", high=MOST_LAYERS)
    read = decoder(config, layers, clip + positions)
    return msgspec.structs.replace(read, inputs=InputSpec(None, PositionSpec(positions)))


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "WhisperForConditionalGeneration": Family(
            read=read,
            # Those of transformers.
            defaults={
                "vocab_size": 51865,
                "hidden_size": 384,
                "decoder_layers": 4,
                "decoder_attention_heads": 6,
                "decoder_ffn_dim": 1536,
                "max_target_positions": 448,
                "max_source_positions": 1500,
                "tie_word_embeddings": True,
                "eos_token_id": 50256,
            },
            weight_names={
                "embedding": "decoder.embed_tokens",
                "positions": "decoder.embed_positions",
                "attention_norm": "decoder.layers.{layer}.self_attn_layer_norm",
                "q": "decoder.layers.{layer}.self_attn.q_proj",
                "k": "decoder.layers.{layer}.self_attn.k_proj",
                "v": "decoder.layers.{layer}.self_attn.v_proj",
                "output": "decoder.layers.{layer}.self_attn.out_proj",
                "cross_norm": "decoder.layers.{layer}.encoder_attn_layer_norm",
                "cross_q": "decoder.layers.{layer}.encoder_attn.q_proj",
                "cross_k": "decoder.layers.{layer}.encoder_attn.k_proj",
                "cross_v": "decoder.layers.{layer}.encoder_attn.v_proj",
                "cross_output": "decoder.layers.{layer}.encoder_attn.out_proj",
                "mlp_norm": "decoder.layers.{layer}.final_layer_norm",
                "up": "decoder.layers.{layer}.fc1",
                "down": "decoder.layers.{layer}.fc2",
                "final_norm": "decoder.layer_norm",
                "head": "proj_out",
            },
            optional_prefix="model.",
            other_weights=("encoder.",),
            takes_sound=True,
        ),
    }
)
