"""Read the feed-forward blocks of a config.json: dense ones, and experts in some layers. Knows no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tokenmill.model.architecture.mlp_spec import MlpSpec, MoeSpec
from tokenmill.model.models.config_reader import ConfigReader

# Several times what any model has; laying out one with millions would take minutes.
MOST_EXPERTS = 4096
# Of the gate: what configs call it, and what it is in `MlpSpec`.
ACTIVATIONS: Mapping[str, str] = MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu"})


def read_activation(
    config: ConfigReader, field: str = "hidden_act", supported: tuple[str, ...] = tuple(ACTIVATIONS)
) -> str:
    """Read the activation of the gate, as `MlpSpec` has it.

    Raises:
        InvalidCheckpoint: it is not supported.
    """
    activation = config.raw(field, "silu")
    if activation not in supported:
        raise config.error(f"{field} {activation!r} is not supported; supported: {', '.join(supported)}")
    return ACTIVATIONS[activation]


def read_mlp(config: ConfigReader, *, bias: bool = False, activation: str = "hidden_act") -> MlpSpec:
    """Read a dense block. `activation`: the field that has it.

    Raises:
        InvalidCheckpoint: a value that is not supported; names the field.
    """
    gate = read_activation(config, activation)
    return MlpSpec(config.integer("intermediate_size"), bias, gate)


def read_sparse_mlps(
    config: ConfigReader, num_layers: int, read_experts: Callable[[ConfigReader, int, int], MoeSpec]
) -> list[MlpSpec | MoeSpec]:
    """Read the block of each layer, where some have experts: each, or every nth, but for those that are listed.

    Args:
        read_experts: takes the number of experts, and how many of them a token is sent to.

    Raises:
        InvalidCheckpoint: a value that is not supported; names the field.
    """
    dense = MlpSpec(config.integer("intermediate_size"), activation=read_activation(config, supported=("silu",)))
    num_experts, experts_per_token = read_expert_counts(config, 128, 8)
    if num_experts == 0:
        return [dense] * num_layers
    step, only_dense = config.integer("decoder_sparse_step", 1), config.integers("mlp_only_layers")
    sparse = [layer for layer in range(num_layers) if layer not in only_dense and (layer + 1) % step == 0]
    if not sparse:
        return [dense] * num_layers
    moe = read_experts(config, num_experts, experts_per_token)
    return [moe if layer in sparse else dense for layer in range(num_layers)]


def read_expert_counts(config: ConfigReader, num_experts: int, experts_per_token: int) -> tuple[int, int]:
    """Return the number of experts, 0: there are none, and how many of them a token is sent to.

    Args:
        num_experts, experts_per_token: where the config has none.

    Raises:
        InvalidCheckpoint: a value that is not supported; names the field.
    """
    # transformers 5 saves `num_local_experts`, 4 saved `num_experts`.
    num_experts = config.integer("num_experts", config.raw("num_local_experts", num_experts), low=0, high=MOST_EXPERTS)
    experts_per_token = config.integer("num_experts_per_tok", experts_per_token)
    if 0 < num_experts < experts_per_token:
        raise config.error(f"num_experts_per_tok ({experts_per_token}) must not exceed num_experts ({num_experts})")
    return num_experts, experts_per_token
