"""Read an encoder's config.json: attention both ways, norms of sums, learned positions, types. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec, SelfAttentionSpec
from tokenmill.model.architecture.input_spec import InputSpec, PositionSpec
from tokenmill.model.architecture.mlp_spec import MlpSpec
from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.architecture.rope_spec import RopeSpec
from tokenmill.model.models.attention_config import read_heads
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, refuse

# What configs call the activation of a block, and what it is in `MlpSpec`. Without a gate all are there.
ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu", "silu": "silu"}
)
GATES = ("gelu", "gelu_new", "gelu_pytorch_tanh", "silu")


def read_encoder_activation(config: ConfigReader, field: str, supported: Sequence[str] = tuple(ACTIVATIONS)) -> str:
    """Read the activation of a block, as `MlpSpec` has it.

    Raises:
        InvalidCheckpoint: it is not supported.
    """
    activation = config.raw(field)
    if activation not in supported:
        raise config.error(f"{field} {activation!r} is not supported; supported: {', '.join(supported)}")
    return ACTIVATIONS[activation]


def read_layer_norm(config: ConfigReader, field: str, *, has_bias: bool = True) -> NormSpec:
    """Read the LayerNorm that all layers have. `field`: the name of its epsilon."""
    return NormSpec(config.number(field), is_centered=True, has_bias=has_bias)


def read_both_ways(config: ConfigReader, rope: RopeSpec | None = None, *, biases: bool = True) -> SelfAttentionSpec:
    """Read attention to all tokens of a text, before and after.

    Raises:
        InvalidCheckpoint: numbers that do not go together; names the field.
    """
    num_heads, num_kv_heads = read_heads(config)
    hidden_size = config.integer("hidden_size")
    if hidden_size % num_heads or hidden_size // num_heads % 2:
        raise config.error(f"hidden_size ({hidden_size}) must be an even number for each of {num_heads} heads")
    head_dim = hidden_size // num_heads
    if config.integer("head_dim", head_dim) != head_dim:
        raise config.error(f"head_dim must be {head_dim}, hidden_size over num_attention_heads, or be left out")
    return SelfAttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        qkv_bias=biases,
        output_bias=biases,
        ahead=None,
    )


def read_bert(config: ConfigReader, *, pads_positions: bool = False) -> Architecture:
    """Read an encoder of BERT's layers: norms of sums, learned positions, types of tokens.

    Args:
        pads_positions: positions are counted behind the id of padding (RoBERTa).

    Raises:
        InvalidCheckpoint: a value that is not supported; names the field.
    """
    refuse(config, "is_decoder", "add_cross_attention")
    positions = config.raw("position_embedding_type", "absolute")
    if positions != "absolute":
        raise config.error(f"position_embedding_type {positions!r} is not supported; supported: absolute")
    if config.raw("num_key_value_heads") is not None:
        raise config.error("num_key_value_heads: BERT has as many as num_attention_heads; leave it out")
    vocab_size = config.integer("vocab_size")
    pad_id = config.integer("pad_token_id", low=0, high=vocab_size - 1) if pads_positions else None
    spec = PositionSpec(config.integer("max_position_embeddings"), pad_id)
    if spec.num_positions < 1:
        raise config.error(f"max_position_embeddings ({spec.num_rows}) has no row behind that of padding ({pad_id})")
    norm = read_layer_norm(config, "layer_norm_eps")
    activation = read_encoder_activation(config, "hidden_act")
    mlp = MlpSpec(config.integer("intermediate_size"), True, activation, is_gated=False)
    layer = LayerSpec(read_both_ways(config), mlp, norm, has_in_norms=False, has_out_norms=True, norms_after=True)
    inputs = InputSpec(norm, spec, config.integer("type_vocab_size"))
    layers = [layer] * config.integer("num_hidden_layers")
    return encoder(config, layers, spec.num_positions, inputs, has_final_norm=False)


def encoder(
    config: ConfigReader, layers: Sequence[LayerSpec], max_position: int, inputs: InputSpec, *, has_final_norm: bool
) -> Architecture:
    """Read the rest of an encoder, given its layers. Nothing ends its texts, and it gives no logits.

    Raises:
        InvalidCheckpoint: a value that is not supported; names the field.
    """
    rest = decoder(config.without("eos_token_id"), layers, max_position)
    return msgspec.structs.replace(rest, inputs=inputs, has_final_norm=has_final_norm, has_head=False)
