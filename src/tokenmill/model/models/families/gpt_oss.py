"""gpt-oss: sinks, windows in every second layer, and experts with biases and a clamped gate, stacked in one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.models.attention_config import read_attention, with_windows
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_frame, read_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GGUF_NAMES, GgufHeader, GgufTable
from tokenmill.model.models.layer_kinds import Windows, read_window, windows_by_type
from tokenmill.model.models.mlp_config import read_sparse_mlps
from tokenmill.model.models.weight_names import LLAMA_NAMES, LLAMA_STACK

# Of the clamped gate, which has these values only.
SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    frame, norm = read_frame(config), read_norm(config)
    attention = read_attention(config, frame.rope, head_dim=64, biases=config.boolean("attention_bias", False))
    attentions = with_windows(msgspec.structs.replace(attention, has_sinks=True), _windows(config, frame.num_layers))
    mlps = read_sparse_mlps(config, frame.num_layers, _read_experts)
    layers = [LayerSpec(one, mlp, norm) for one, mlp in zip(attentions, mlps, strict=True)]
    return decoder(config, layers, frame.max_position)


def _windows(config: ConfigReader, num_layers: int) -> Windows:
    """Read the windows from `layer_types`; without it the first layer has one, the third and so on."""
    window = read_window(config, default=128)
    if config.raw("layer_types") is None:
        return tuple(None if layer % 2 else window for layer in range(num_layers))
    return windows_by_type(config, num_layers, window)


def _read_experts(config: ConfigReader, num_experts: int, experts_per_token: int) -> MoeSpec:
    for field, only in SWIGLU.items():
        if config.number(field, only) != only:
            raise config.error(f"{field} {config.raw(field)!r} is not supported; supported: {only}")
    size = config.integer("intermediate_size")
    return MoeSpec(num_experts, experts_per_token, size, norm_topk_prob=True, activation="clamped", has_biases=True)


def _gguf_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the middle of an expert, which has a name of its own, and YaRN's unrounded ramp, which no key says."""
    scaling = fields.get("rope_scaling")
    found = {"intermediate_size": fields["moe_intermediate_size"]} if "moe_intermediate_size" in fields else {}
    return {**found, **({"rope_scaling": {**scaling, "truncate": False}} if scaling else {})}


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "GptOssForCausalLM": Family(
            read=read,
            defaults={
                "attention_bias": True,
                "num_hidden_layers": 36,
                "num_local_experts": 128,
                "num_experts_per_tok": 4,
                "vocab_size": 201088,
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "sliding_window": 128,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150000.0,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            },
            weight_names={
                **LLAMA_NAMES,
                "router": "model.layers.{layer}.mlp.router",
                **dict.fromkeys(("expert_gate", "expert_up"), LLAMA_STACK.gate_up),
                "expert_down": LLAMA_STACK.down,
            },
            expert_stack=msgspec.structs.replace(LLAMA_STACK, takes_turns=True),
            gguf=GgufTable(
                "gpt-oss",
                {**GGUF_NAMES, "mlp_norm": "blk.{layer}.post_attention_norm"},
                kinds={"sinks": "attn_sinks.weight"},
                fields=_gguf_fields,
            ),
        )
    }
)
