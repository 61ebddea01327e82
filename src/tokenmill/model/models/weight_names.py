"""Names of a decoder's weights in checkpoints: every weight has a role, and a table turns roles into names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from tokenmill.model.architecture.mlp_spec import ExpertStack

LLAMA_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "model.embed_tokens",
        "attention_norm": "model.layers.{layer}.input_layernorm",
        "q": "model.layers.{layer}.self_attn.q_proj",
        "k": "model.layers.{layer}.self_attn.k_proj",
        "v": "model.layers.{layer}.self_attn.v_proj",
        "output": "model.layers.{layer}.self_attn.o_proj",
        "attention": "model.layers.{layer}.self_attn",
        "q_norm": "model.layers.{layer}.self_attn.q_norm",
        "k_norm": "model.layers.{layer}.self_attn.k_norm",
        "mlp_norm": "model.layers.{layer}.post_attention_layernorm",
        "gate": "model.layers.{layer}.mlp.gate_proj",
        "up": "model.layers.{layer}.mlp.up_proj",
        "down": "model.layers.{layer}.mlp.down_proj",
        "router": "model.layers.{layer}.mlp.gate",
        "expert_gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj",
        "expert_up": "model.layers.{layer}.mlp.experts.{expert}.up_proj",
        "expert_down": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
        "final_norm": "model.norm",
        "head": "lm_head",
    }
)
"""Role of a weight -> what Llama, and most families after it, call it, without `.weight` or `.bias`."""

LLAMA_STACK = ExpertStack("model.layers.{layer}.mlp.experts.gate_up_proj", "model.layers.{layer}.mlp.experts.down_proj")
"""The tensors in which all experts of a layer are stored where they are stacked."""


def stack_beside_a_tower(stack: ExpertStack) -> ExpertStack:
    """Return the names of stacked experts where a vision tower stands beside the decoder."""
    names = beside_a_tower({"gate_up": stack.gate_up, "down": stack.down})
    return msgspec.structs.replace(stack, gate_up=names["gate_up"], down=names["down"])


def beside_a_tower(names: Mapping[str, str]) -> Mapping[str, str]:
    """Return the names where a vision tower stands beside the decoder."""
    return MappingProxyType({role: name.replace("model.", "model.language_model.", 1) for role, name in names.items()})


class WeightKey(msgspec.Struct, frozen=True):
    """A weight of a decoder, independent of its name in checkpoints.

    Attributes:
        role: a key of a family's table of names.
        kind: `weight`, `bias`, or what follows the name otherwise, such as `sinks` or `A_log`.
    """

    role: str
    layer: int | None = None
    expert: int | None = None
    kind: str = "weight"

    def name(self, names: Mapping[str, str]) -> str:
        """Return its name by a table of names."""
        return f"{names[self.role].format(layer=self.layer, expert=self.expert)}.{self.kind}"
