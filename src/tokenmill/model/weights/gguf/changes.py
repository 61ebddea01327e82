"""Undo what llama.cpp's converter does to the values of some weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.model.architecture.architecture import Architecture, DeltaNetSpec
from tokenmill.model.models.families import FAMILIES
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.quantization.packed import Rows, dense, pick_columns, pick_rows


@dataclass(frozen=True, slots=True)
class Change:
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

    def undo(self, rows: Rows) -> Rows:
        """Return the values as Hugging Face's checkpoints have them."""
        if self.rows is not None:
            rows = pick_rows(rows, self.rows)
        if self.columns is not None:
            rows = pick_columns(rows, self.columns)
        if self.is_negative_exponential:
            return dense(rows).float().neg().log()
        return dense(rows).float() - self.surplus if self.surplus else rows


UNCHANGED = Change()


def change_of(key: WeightKey, num_rows: int, architecture: Architecture) -> Change:
    """Return the change that was made to the rows that a target takes."""
    family = FAMILIES[architecture.name]
    recurrence = None if key.layer is None else architecture.layers[key.layer].recurrence
    if isinstance(recurrence, DeltaNetSpec) and key.role.startswith("delta"):
        return _of_delta_net(key, recurrence)
    if family.gguf_interleaves_heads and key.role in ("q", "k"):
        return Change(rows=_halves_apart(num_rows, _head_dim(architecture, key)))
    # A norm whose weight is an offset is stored with the 1.
    return Change(surplus=1.0) if architecture.norm.is_offset and key.role.endswith("norm") else UNCHANGED


def _head_dim(architecture: Architecture, key: WeightKey) -> int:
    assert key.layer is not None, "heads are those of a layer"
    attention = architecture.layers[key.layer].attention
    assert attention is not None, "and the layer has some"
    return attention.head_dim


def _halves_apart(num_rows: int, head_dim: int) -> list[int]:
    """Return the order that parts pairs that rotate together: of each head first the even rows, then the odd ones."""
    inside = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    return [head + row for head in range(0, num_rows, head_dim) for row in inside]


def _of_delta_net(key: WeightKey, spec: DeltaNetSpec) -> Change:
    """Return the change of a weight with value heads: those of a key head lie as far apart as there are key heads.

    |key head 0, 1st value head|key head 1, 1st|...|key head 0, 2nd|key head 1, 2nd|...
    """
    num_keys, group = spec.num_key_heads, spec.num_value_heads // spec.num_key_heads
    places = [which * num_keys + head for head in range(num_keys) for which in range(group)]
    values = [spec.value_size * place + row for place in places for row in range(spec.value_size)]
    if key.role in ("delta_v", "delta_z"):
        return Change(rows=values)
    if key.role in ("delta_a", "delta_b") or key.kind == "dt_bias":
        return Change(rows=places)
    if key.kind == "A_log":
        return Change(rows=places, is_negative_exponential=True)
    if key.role == "delta_filters":
        before = 2 * spec.keys_width
        return Change(rows=[*range(before), *(before + row for row in values)])
    return Change(columns=values) if key.role == "delta_output" else UNCHANGED
