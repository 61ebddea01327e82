"""Granite 4: state spaces beside attention, see `models.mamba`, Granite's four multipliers, and experts in some models.

A block that every token goes through stands beside the experts, or alone. Layers do not know the positions of their
tokens, but for models that are attention throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.model.architecture.architecture import Architecture, LayerSpec, SelfAttentionSpec
from tokenmill.model.architecture.mlp_spec import ExpertStack, MlpSpec, MoeSpec
from tokenmill.model.architecture.recurrence_spec import StateSpaceSpec
from tokenmill.model.architecture.rope_spec import RopeSpec
from tokenmill.model.models.attention_config import read_attention
from tokenmill.model.models.config_reader import ConfigReader
from tokenmill.model.models.decoder_config import decoder, read_frame, read_norm
from tokenmill.model.models.family import Family
from tokenmill.model.models.gguf_table import GGUF_NAMES, Change, GgufHeader, GgufTable, interleaved_heads
from tokenmill.model.models.layer_kinds import read_kinds
from tokenmill.model.models.mlp_config import read_activation, read_expert_counts
from tokenmill.model.models.weight_names import LLAMA_NAMES, WeightKey

# As published, and as transformers 5 saves them.
ATTENTION, STATE_SPACE = ("attention", "full_attention"), ("mamba", "linear_attention")
# What JSON has in the place of infinity.
ENDLESS = ({"__float__": "Infinity"}, float("inf"))


def read(config: ConfigReader) -> Architecture:
    """Read the decoder."""
    frame, norm, mlp = read_frame(config), read_norm(config), _mlp(config)
    attention, multiplier = _attention(config, frame.rope), config.number("residual_multiplier", 1.0)
    kinds = _kinds(config, frame.num_layers)
    space = None if all(kind in ATTENTION for kind in kinds) else _state_space(config)
    layers = [
        LayerSpec(attention, mlp, norm, multiplier)
        if kind in ATTENTION
        else LayerSpec(None, mlp, norm, multiplier, recurrence=space)
        for kind in kinds
    ]
    return decoder(
        config,
        layers,
        frame.max_position,
        embedding_multiplier=config.number("embedding_multiplier", 1.0),
        logits_scaling=config.number("logits_scaling", 1.0),
    )


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    if config.raw("layer_types") is None:
        return ["linear_attention"] * num_layers
    return read_kinds(config, num_layers, (*ATTENTION, *STATE_SPACE))


def _attention(config: ConfigReader, rope: RopeSpec) -> SelfAttentionSpec:
    attention = read_attention(config, rope, biases=config.boolean("attention_bias", False))
    kind = config.raw("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise config.error(f"position_embedding_type {kind!r} is not supported; supported: null, nope, rope")
    scale = config.number("attention_multiplier", 1.0)
    return msgspec.structs.replace(attention, scale=scale, rope=rope if kind == "rope" else None)


def _mlp(config: ConfigReader) -> MlpSpec | MoeSpec:
    read_activation(config, supported=("silu",))
    num_experts, chosen = read_expert_counts(config, 8, 2)
    shared = config.integer("shared_intermediate_size", 1024)
    if num_experts == 0:
        return MlpSpec(shared)
    size = config.integer("intermediate_size")
    return MoeSpec(num_experts, chosen, size, norm_topk_prob=True, shared_size=shared, has_shared_gate=False)


def _state_space(config: ConfigReader) -> StateSpaceSpec:
    num_heads, num_groups = config.integer("mamba_n_heads", 128), config.integer("mamba_n_groups", 1)
    inner = config.integer("mamba_expand", 2) * config.integer("hidden_size")
    if inner % num_heads or num_heads % num_groups:
        raise config.error(
            f"mamba_n_heads ({num_heads}) must divide mamba_expand times hidden_size ({inner}) and be a multiple of "
            f"mamba_n_groups ({num_groups})"
        )
    size = inner // num_heads
    if config.raw("mamba_d_head", "auto") != "auto" and config.integer("mamba_d_head") != size:
        raise config.error(f"mamba_d_head must be {size}, mamba_expand times hidden_size over mamba_n_heads")
    limit = config.raw("time_step_limit")
    if limit is not None and (list(limit)[:1] != [0.0] or list(limit)[1:] not in [[one] for one in ENDLESS]):
        # transformers bounds the steps of prompts by it, and not those of what follows.
        raise config.error(f"time_step_limit {limit!r} is not supported; leave it out")
    return StateSpaceSpec(
        num_heads,
        size,
        num_groups,
        config.integer("mamba_d_state", 256),
        config.integer("mamba_d_conv", 4, low=2),
        read_norm(config),
        config.boolean("mamba_conv_bias", True),
        config.boolean("mamba_proj_bias", False),
    )


def _gguf_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of the state space, which layers have attention, and whether that knows positions."""
    keys = {
        "mamba_n_heads": "ssm.time_step_rank",
        "mamba_n_groups": "ssm.group_count",
        "mamba_d_state": "ssm.state_size",
        "mamba_d_conv": "ssm.conv_kernel",
    }
    kind = "granitehybrid"
    sizes = {field: header.metadata.get(f"{kind}.{key}") for field, key in keys.items()}
    heads, inner = fields.get("num_key_value_heads", 0), header.metadata.get(f"{kind}.ssm.inner_size")
    each = [int(count) for count in heads] if isinstance(heads, list | tuple) else [int(heads)]
    return {
        **{field: size for field, size in sizes.items() if size is not None},
        **({"mamba_expand": inner // fields["hidden_size"]} if inner else {}),
        "layer_types": [
            "attention" if each[layer % len(each)] else "mamba" for layer in range(fields["num_hidden_layers"])
        ],
        "num_key_value_heads": max(each, default=0),
        "num_local_experts": fields.get("num_experts", 0),
        "shared_intermediate_size": fields.get("shared_expert_intermediate_size", fields.get("intermediate_size")),
        "intermediate_size": fields.get("moe_intermediate_size", fields.get("intermediate_size")),
        "position_embedding_type": "rope" if header.metadata.get(f"{kind}.rope.scaling.finetuned") else "nope",
    }


def _gguf_change(key: WeightKey, num_rows: int, architecture: Architecture) -> Change | None:
    """Return the change of rates, which are stored as they are applied, and of q and k."""
    if key.kind == "A_log":
        return Change(is_negative_exponential=True)
    return interleaved_heads(key, num_rows, architecture)


_MLP, _MOE, _MAMBA = (f"model.layers.{{layer}}.{part}" for part in ("shared_mlp", "block_sparse_moe", "mamba"))

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "GraniteMoeHybridForCausalLM": Family(
            read=read,
            defaults={
                "vocab_size": 32000,
                "hidden_size": 4096,
                "intermediate_size": 11008,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "max_position_embeddings": 2048,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            weight_names={
                **LLAMA_NAMES,
                **dict.fromkeys(("gate", "up", "shared_gate", "shared_up"), f"{_MLP}.input_linear"),
                **dict.fromkeys(("down", "shared_down"), f"{_MLP}.output_linear"),
                "router": f"{_MOE}.router.layer",
                **dict.fromkeys(("expert_gate", "expert_up"), f"{_MOE}.input_linear"),
                "expert_down": f"{_MOE}.output_linear",
                "mamba": _MAMBA,
                **dict.fromkeys(("mamba_inputs", "mamba_steps"), f"{_MAMBA}.in_proj"),
                "mamba_filters": f"{_MAMBA}.conv1d",
                "mamba_norm": f"{_MAMBA}.norm",
                "mamba_output": f"{_MAMBA}.out_proj",
            },
            expert_stack=ExpertStack(f"{_MOE}.input_linear.weight", f"{_MOE}.output_linear.weight"),
            gguf=GgufTable(
                "granitehybrid",
                {
                    **GGUF_NAMES,
                    "shared_gate": "blk.{layer}.ffn_gate_shexp",
                    "shared_up": "blk.{layer}.ffn_up_shexp",
                    "shared_down": "blk.{layer}.ffn_down_shexp",
                    **dict.fromkeys(("mamba_inputs", "mamba_steps"), "blk.{layer}.ssm_in"),
                    "mamba_filters": "blk.{layer}.ssm_conv1d",
                    "mamba_norm": "blk.{layer}.ssm_norm",
                    "mamba_output": "blk.{layer}.ssm_out",
                },
                kinds={"A_log": "ssm_a", "dt_bias": "ssm_dt.bias", "D": "ssm_d"},
                fields=_gguf_fields,
                change=_gguf_change,
            ),
        )
    }
)
