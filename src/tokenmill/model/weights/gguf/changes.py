"""Undo what llama.cpp's converter does to the values of some weights."""

from __future__ import annotations

from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.models.gguf_table import UNCHANGED, Change, GgufTable
from tokenmill.model.models.weight_names import WeightKey
from tokenmill.model.quantization.packed import Rows, dense, pick_columns, pick_rows


def change_of(key: WeightKey, num_rows: int, architecture: Architecture, table: GgufTable) -> Change:
    """Return the change that was made to the rows that a target takes."""
    own = table.change(key, num_rows, architecture)
    if own is not None:
        return own
    # A norm whose weight is an offset is stored with the 1.
    return Change(surplus=1.0) if architecture.norm.is_offset and key.role.endswith("norm") else UNCHANGED


def undo(change: Change, rows: Rows) -> Rows:
    """Return the values as Hugging Face's checkpoints have them."""
    if change.rows is not None:
        rows = pick_rows(rows, change.rows)
    if change.columns is not None:
        rows = pick_columns(rows, change.columns)
    if change.is_negative_exponential:
        return dense(rows).float().neg().log()
    return dense(rows).float() - change.surplus if change.surplus else rows
