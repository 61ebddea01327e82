"""Additions to the embeddings of an encoder's tokens, as plain frozen data."""

from __future__ import annotations

import msgspec

from tokenmill.model.architecture.norm_spec import NormSpec


class PositionSpec(msgspec.Struct, frozen=True):
    """Learned embeddings of positions: a table with a row for each.

    Attributes:
        num_rows: of the table.
        pad_id: a token of this id has row `pad_id`, and all others are counted from row `pad_id + 1` on (RoBERTa).
            None: the token at position p has row p.
    """

    num_rows: int
    pad_id: int | None = None

    @property
    def num_positions(self) -> int:
        """Tokens of the longest text that has a row for each."""
        return self.num_rows - (0 if self.pad_id is None else self.pad_id + 1)


class InputSpec(msgspec.Struct, frozen=True):
    """The additions to the embeddings of tokens, and the norm of their sum.

    Attributes:
        norm: of the sum; None: absent. positions: None: layers rotate by positions instead.
        token_types: rows of a table of types, of which a text alone has row 0 throughout; 0: there is no such table.
    """

    norm: NormSpec | None
    positions: PositionSpec | None = None
    token_types: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of all tables."""
        return self.token_types + (0 if self.positions is None else self.positions.num_rows)

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters."""
        norm = 0 if self.norm is None else self.norm.num_parameters(hidden_size)
        return self.num_rows * hidden_size + norm
