"""Jina's v3 (Sturua et al. 2024: jina-embeddings-v3, as transformers has it): XLM-RoBERTa with ropes for positions.

The low-rank adapters of its tasks are files of their own there, and not read. Jina's own form has them within the
weights, and is refused by its `position_embedding_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.architecture.input_spec import InputSpec
from tokenmill.model.architecture.mlp_spec import MlpSpec
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import read_depth
from tokenmill.model.models.encoder_config import encoder, read_both_ways, read_encoder_activation, read_layer_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.rope_config import read_rope


def read(config: ConfigReader) -> Architecture:
    """Read the encoder."""
    num_layers, max_position = read_depth(config)
    rope, max_position = read_rope(config, max_position)
    norm = read_layer_norm(config, "layer_norm_eps")
    activation = read_encoder_activation(config, "hidden_act")
    mlp = MlpSpec(config.integer("intermediate_size"), True, activation, is_gated=False)
    attention = read_both_ways(config, rope)
    layer = LayerSpec(attention, mlp, norm, has_in_norms=False, has_out_norms=True, norms_after=True)
    inputs = InputSpec(norm, None, config.integer("type_vocab_size"))
    return encoder(config, [layer] * num_layers, max_position, inputs, has_final_norm=False)


_FAMILY = Family(
    read=read,
    defaults={
        "vocab_size": 250002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "hidden_act": "gelu",
        "max_position_embeddings": 8194,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "rope_theta": 20000.0,
    },
    weight_names={
        "embedding": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "embedding_norm": "emb_ln",
        **dict.fromkeys(("q", "k", "v"), "encoder.layers.{layer}.mixer.Wqkv"),
        "output": "encoder.layers.{layer}.mixer.out_proj",
        "attention_out_norm": "encoder.layers.{layer}.norm1",
        "up": "encoder.layers.{layer}.mlp.fc1",
        "down": "encoder.layers.{layer}.mlp.fc2",
        "mlp_out_norm": "encoder.layers.{layer}.norm2",
    },
    optional_prefix="roberta.",
    other_weights=("pooler.", "lm_head."),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    dict.fromkeys(("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM"), _FAMILY)
)
