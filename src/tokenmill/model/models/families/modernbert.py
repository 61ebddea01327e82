"""ModernBERT (Warner et al. 2024): gte-modernbert, ettin, granite-embedding-r2. Two of three layers have windows.

A window reaches as far behind a token as before it. The ropes of layers with and without a window differ; the first
layer's attention takes the embeddings as they are, which have just been normed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.architecture.input_spec import InputSpec
from tokenmill.model.architecture.mlp_spec import MlpSpec
from tokenmill.model.architecture.rope_spec import RopeSpec
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import read_depth
from tokenmill.model.models.encoder_config import (
    GATES,
    encoder,
    read_both_ways,
    read_encoder_activation,
    read_layer_norm,
)
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GgufHeader, GgufTable
from tokenmill.model.models.layer_kinds import read_kinds
from tokenmill.model.models.rope_config import read_local_rope, read_rope

KINDS = ("full_attention", "sliding_attention")


def read(config: ConfigReader) -> Architecture:
    """Read the encoder."""
    num_layers, max_position = read_depth(config)
    norm = read_layer_norm(config, "norm_eps", has_bias=config.boolean("norm_bias", False))
    rope, local_rope = _read_ropes(config, max_position)
    full = read_both_ways(config, rope, biases=config.boolean("attention_bias", False))
    reach = config.integer("local_attention") // 2
    local = msgspec.structs.replace(full, rope=local_rope, window=reach + 1, ahead=reach)
    activation = read_encoder_activation(config, "hidden_activation", GATES)
    mlp = MlpSpec(config.integer("intermediate_size"), config.boolean("mlp_bias", False), activation)
    layers = [LayerSpec(full if kind == KINDS[0] else local, mlp, norm) for kind in _read_kinds(config, num_layers)]
    layers[0] = msgspec.structs.replace(layers[0], norms_attention_input=False)
    return encoder(config, layers, max_position, InputSpec(norm), has_final_norm=True)


def _read_ropes(config: ConfigReader, max_position: int) -> tuple[RopeSpec, RopeSpec]:
    """Return the ropes of layers without and with a window, in the spelling of transformers 5 or 4."""
    if config.raw("rope_parameters") is None:
        return RopeSpec(config.number("global_rope_theta", 160000.0)), RopeSpec(config.number("local_rope_theta", 1e4))
    return read_rope(config, max_position, KINDS[0])[0], read_local_rope(config, 10000.0)


def _read_kinds(config: ConfigReader, num_layers: int) -> list[str]:
    if config.raw("layer_types") is not None:
        return read_kinds(config, num_layers, KINDS)
    interval = config.integer("global_attn_every_n_layers", 3)
    return [KINDS[bool(layer % interval)] for layer in range(num_layers)]


def _gguf_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the norm's epsilon, and windows and ropes by the names of version 4 of transformers."""
    found = {
        "norm_eps": fields.get("layer_norm_eps"),
        "hidden_activation": "gelu",
        "local_attention": fields.get("sliding_window"),
        "global_attn_every_n_layers": header.metadata.get("modern-bert.attention.sliding_window_pattern"),
        "global_rope_theta": fields.get("rope_theta"),
        "local_rope_theta": fields.get("rope_local_base_freq"),
    }
    return {name: value for name, value in found.items() if value is not None}


_GGUF_NAMES = {
    "embedding": "token_embd",
    "embedding_norm": "token_embd_norm",
    "attention_norm": "blk.{layer}.attn_norm",
    **dict.fromkeys(("q", "k", "v"), "blk.{layer}.attn_qkv"),
    "output": "blk.{layer}.attn_output",
    "mlp_norm": "blk.{layer}.ffn_norm",
    **dict.fromkeys(("gate", "up"), "blk.{layer}.ffn_up"),
    "down": "blk.{layer}.ffn_down",
    "final_norm": "output_norm",
}
_FAMILY = Family(
    read=read,
    defaults={
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "local_attention": 128,
    },
    weight_names={
        "embedding": "embeddings.tok_embeddings",
        "embedding_norm": "embeddings.norm",
        "attention_norm": "layers.{layer}.attn_norm",
        **dict.fromkeys(("q", "k", "v"), "layers.{layer}.attn.Wqkv"),
        "output": "layers.{layer}.attn.Wo",
        "mlp_norm": "layers.{layer}.mlp_norm",
        **dict.fromkeys(("gate", "up"), "layers.{layer}.mlp.Wi"),
        "down": "layers.{layer}.mlp.Wo",
        "final_norm": "final_norm",
    },
    optional_prefix="model.",
    other_weights=("head.", "decoder.", "classifier."),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "ModernBertModel": msgspec.structs.replace(
            _FAMILY, gguf=GgufTable("modern-bert", _GGUF_NAMES, fields=_gguf_fields)
        ),
        "ModernBertForMaskedLM": _FAMILY,
    }
)
