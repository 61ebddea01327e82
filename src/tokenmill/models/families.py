"""config.json -> `Architecture`. A family is a few facts that its config.json does not say; the reading is shared.

Written against the configs that transformers 4 and 5 save: version 5 has `rope_parameters` and `dtype` where version 4
has `rope_theta` with `rope_scaling` and `torch_dtype`. Knows no torch and opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tokenmill.models.architecture import Architecture, MoeSpec
from tokenmill.models.config_reader import ConfigReader
from tokenmill.models.rope_config import read_rope

Windows = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """What tells one family from another.

    Attributes:
        windows: reads the sliding windows, one per layer.
        qkv_bias, output_bias, mlp_bias: True or False when the family fixes it, else the config field that says it.
        head_dim: config field `head_dim` when it is absent; None: hidden size / heads.
        sparse: the config describes experts.
        defaults: values of fields that may be absent.
    """

    windows: Callable[[ConfigReader, int], Windows]
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = None
    sparse: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


def _no_windows(config: ConfigReader, num_layers: int) -> Windows:
    return (None,) * num_layers


def _one_window(config: ConfigReader, num_layers: int) -> Windows:
    return (_window(config),) * num_layers


def _window(config: ConfigReader) -> int | None:
    # null means "no window"; absent means 4096, as in transformers.
    if not config.has("sliding_window"):
        return 4096
    return None if config.raw("sliding_window") is None else config.integer("sliding_window")


def _switched_window(config: ConfigReader, num_layers: int) -> Windows:
    return _one_window(config, num_layers) if config.boolean("use_sliding_window", False) else (None,) * num_layers


def _layered_windows(config: ConfigReader, num_layers: int) -> Windows:
    """Qwen: `layer_types` says which layers slide; older configs slide from layer `max_window_layers` on."""
    window = _window(config) if config.boolean("use_sliding_window", False) else None
    layer_types = config.raw("layer_types")
    if layer_types is None:
        first = config.integer("max_window_layers", 28, low=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise config.error(f"layer_types must be a list of {num_layers} names, one per layer")
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error(f"layer_types has {kind!r}; supported: full_attention, sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(
            windows=_no_windows,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            mlp_bias="mlp_bias",
            defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
        ),
        "MistralForCausalLM": Family(
            windows=_one_window,
            defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "eos_token_id": 2},
        ),
        "Qwen2ForCausalLM": Family(windows=_layered_windows, qkv_bias=True),
        "Qwen3ForCausalLM": Family(
            windows=_layered_windows,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            head_dim=128,
        ),
        "Qwen3MoeForCausalLM": Family(
            windows=_switched_window,
            qkv_bias="attention_bias",
            output_bias="attention_bias",
            qk_norm=True,
            sparse=True,
        ),
    }
)


def read_architecture(fields: Mapping[str, Any], source: str = "config.json") -> Architecture:
    """The architecture that a config.json describes.

    Args:
        fields: the parsed file.
        source: what error messages call it, e.g. its path.

    Raises:
        InvalidCheckpoint: the architecture, a feature or a value is not supported; names the source and the field.
    """
    name = _architecture_name(fields, source)
    family = FAMILIES[name]
    config = ConfigReader(fields, source, family.defaults)
    _refuse_unsupported(config)
    num_layers = config.integer("num_hidden_layers")
    num_heads, num_kv_heads = _heads(config)
    max_position = config.integer("max_position_embeddings", 32768)
    head_dim = _head_dim(config, family, num_heads)
    rope, max_position = read_rope(config, max_position)
    vocab_size = config.integer("vocab_size")
    return Architecture(
        name=name,
        num_layers=num_layers,
        hidden_size=config.integer("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=vocab_size,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position=max_position,
        windows=family.windows(config, num_layers),
        qkv_bias=_fact(config, family.qkv_bias),
        output_bias=_fact(config, family.output_bias),
        mlp_bias=_fact(config, family.mlp_bias),
        qk_norm=family.qk_norm,
        tie_embeddings=config.boolean("tie_word_embeddings", False),
        moe=_read_moe(config, num_layers) if family.sparse else None,
        bos_token_id=next(iter(config.integers("bos_token_id")), None),
        eos_token_ids=tuple(token for token in config.integers("eos_token_id") if 0 <= token < vocab_size),
        dtype=_dtype_name(config),
    )


def _architecture_name(fields: Mapping[str, Any], source: str) -> str:
    supported = ", ".join(sorted(FAMILIES))
    names = fields.get("architectures")
    config = ConfigReader(fields, source)
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.error(f"architectures must name the model's architecture; supported: {supported}")
    if names[0] not in FAMILIES:
        raise config.error(f"architecture {names[0]} is not supported; supported: {supported}")
    return names[0]


def _refuse_unsupported(config: ConfigReader) -> None:
    activation = config.raw("hidden_act", "silu")
    if activation != "silu":
        raise config.error(f"hidden_act {activation!r} is not supported; supported: silu")


def _heads(config: ConfigReader) -> tuple[int, int]:
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    return num_heads, num_kv_heads


def _head_dim(config: ConfigReader, family: Family, num_heads: int) -> int:
    hidden_size = config.integer("hidden_size")
    if config.raw("head_dim") is None and family.head_dim is None and hidden_size % num_heads:
        raise config.error(f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})")
    head_dim = config.integer("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise config.error(f"head_dim must be even, got {head_dim}")
    return head_dim


def _fact(config: ConfigReader, fact: bool | str) -> bool:
    return config.boolean(fact, False) if isinstance(fact, str) else fact


def _read_moe(config: ConfigReader, num_layers: int) -> MoeSpec | None:
    # transformers 5 saves `num_local_experts`, 4 saved `num_experts`.
    num_experts = config.integer("num_experts", config.raw("num_local_experts", 128), low=0)
    step = config.integer("decoder_sparse_step", 1)
    dense = config.integers("mlp_only_layers")
    sparse = frozenset(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    if num_experts == 0 or not sparse:
        return None
    experts_per_token = config.integer("num_experts_per_tok", 8)
    if experts_per_token > num_experts:
        raise config.error(f"num_experts_per_tok ({experts_per_token}) must not exceed num_experts ({num_experts})")
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        intermediate_size=config.integer("moe_intermediate_size", 768),
        norm_topk_prob=config.boolean("norm_topk_prob", False),
        sparse_layers=sparse,
    )


def _dtype_name(config: ConfigReader) -> str | None:
    name = config.raw("dtype", config.raw("torch_dtype"))
    return name if isinstance(name, str) else None
