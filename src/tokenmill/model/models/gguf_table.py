"""A family in GGUF files: llama.cpp's names of its weights, and how its converter changes values and fields.

Knows no torch and opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.models.weight_names import WeightKey

GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "token_embd",
        "attention_norm": "blk.{layer}.attn_norm",
        "q": "blk.{layer}.attn_q",
        "k": "blk.{layer}.attn_k",
        "v": "blk.{layer}.attn_v",
        "output": "blk.{layer}.attn_output",
        "q_norm": "blk.{layer}.attn_q_norm",
        "k_norm": "blk.{layer}.attn_k_norm",
        "attention_out_norm": "blk.{layer}.post_attention_norm",
        "mlp_norm": "blk.{layer}.ffn_norm",
        "mlp_out_norm": "blk.{layer}.post_ffw_norm",
        "gate": "blk.{layer}.ffn_gate",
        "up": "blk.{layer}.ffn_up",
        "down": "blk.{layer}.ffn_down",
        "router": "blk.{layer}.ffn_gate_inp",
        "expert_gate": "blk.{layer}.ffn_gate_exps",
        "expert_up": "blk.{layer}.ffn_up_exps",
        "expert_down": "blk.{layer}.ffn_down_exps",
        "final_norm": "output_norm",
        "head": "output",
    }
)
"""Role of a weight -> its name in most files; the experts of a layer are stacked in one tensor."""

ENCODER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **{role: GGUF_NAMES[role] for role in ("embedding", "q", "k", "v", "output", "gate", "up", "down")},
        "positions": "position_embd",
        "token_types": "token_types",
        "embedding_norm": "token_embd_norm",
        "attention_out_norm": "blk.{layer}.attn_output_norm",
        "mlp_out_norm": "blk.{layer}.layer_output_norm",
    }
)
"""The same of encoders with norms of sums."""
TOKEN_TYPES = "tokenizer.ggml.token_type_count"


class Change(msgspec.Struct, frozen=True):
    """The change between the rows in a file and those that are wanted.

    Attributes:
        rows: their numbers, in the order that is wanted; None: as they are.
        columns: the same for the numbers of each row.
        surplus: number that was added to all values.
        is_negative_exponential: stored as minus their exponentials.
    """

    rows: Sequence[int] | None = None
    columns: Sequence[int] | None = None
    surplus: float = 0.0
    is_negative_exponential: bool = False


UNCHANGED = Change()


class GgufHeader(Protocol):
    """The part of a GGUF file that a configuration is made of."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Values by key."""

    @property
    def tensors(self) -> Container[str]:
        """Names of the tensors."""

    def floats(self, name: str) -> list[float] | None:
        """Return the numbers of a float32 tensor; None: the file has no such tensor."""


def _no_fields(header: GgufHeader, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _no_change(key: WeightKey, num_rows: int, architecture: Architecture) -> Change | None:
    return None


class GgufTable(msgspec.Struct, frozen=True):
    """The form of a family in llama.cpp's files.

    Attributes:
        name: llama.cpp's name of the family.
        names: names of the weights.
        kinds: names of what belongs to a layer and is neither a weight nor a bias, by `WeightKey.kind`.
        fields: returns the fields of config.json that are not where other families have them, given those found.
        change: returns the change that the converter made to the rows of a weight; None: that of every family.
        without_tower: the family that a file belongs to while no file with its vision tower is there; "": the same.
        more_names: its other names of the family, for forms of it.
        joined: for roles that share a tensor in some files, its name there; those of experts stand there in the order
            of this table.
    """

    name: str
    names: Mapping[str, str] = msgspec.field(default_factory=lambda: GGUF_NAMES)
    kinds: Mapping[str, str] = msgspec.field(default_factory=dict)
    fields: Callable[[GgufHeader, Mapping[str, Any]], dict[str, Any]] = _no_fields
    change: Callable[[WeightKey, int, Architecture], Change | None] = _no_change
    without_tower: str = ""
    more_names: tuple[str, ...] = ()
    joined: Mapping[str, str] = msgspec.field(default_factory=dict)

    def of_drafting_layer(self, layer: int) -> GgufTable:
        """Return the names of the weights of a layer that drafts further tokens, number `layer` of the file."""
        names = {role: name.replace("{layer}", str(layer)) for role, name in self.names.items()}
        own = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "taps": "eh_proj", "final_norm": "shared_head_norm"}
        names |= {role: f"blk.{layer}.nextn.{name}" for role, name in own.items()}
        return msgspec.structs.replace(self, names=names)

    def in_file(self, tensors: Container[str]) -> GgufTable:
        """Return the table of a file with these tensors: a role that has none of its own there shares one."""
        own = {role: self.names[role].format(layer=0) for role in self.joined}
        joined = {role: self.joined[role] for role, name in own.items() if f"{name}.weight" not in tensors}
        return msgspec.structs.replace(self, names={**self.names, **joined}) if joined else self

    def fellows(self, role: str) -> list[str]:
        """Return the roles that share the tensor of a role, itself included, in their order there."""
        return [other for other in self.joined if self.names[other] == self.names[role]] or [role]

    def name_of(self, key: WeightKey) -> str:
        """Return the name of a weight."""
        if key.kind in self.kinds:
            return f"blk.{key.layer}.{self.kinds[key.kind]}"
        return key.name(self.names)


def interleaved_heads(key: WeightKey, num_rows: int, architecture: Architecture) -> Change | None:
    """Part the rows of q and k that rotate together, which the converter puts side by side."""
    if key.role not in ("q", "k"):
        return None
    assert key.layer is not None, "heads are those of a layer"
    attention = architecture.layers[key.layer].attention
    assert attention is not None, "and the layer has some"
    size = attention.head_dim
    inside = [*range(0, size, 2), *range(1, size, 2)]
    return Change(rows=[head + row for head in range(0, num_rows, size) for row in inside])


def first_drafting_layer(header: GgufHeader) -> int:
    """Return the number of the first layer that drafts further tokens."""
    kind = header.metadata.get("general.architecture")
    return int(header.metadata.get(f"{kind}.block_count", 0)) - num_drafting_layers(header)


def num_drafting_layers(header: GgufHeader) -> int:
    """Return how many layers behind the model's own draft further tokens; they count among its blocks."""
    return int(header.metadata.get(f"{header.metadata.get('general.architecture')}.nextn_predict_layers", 0))
