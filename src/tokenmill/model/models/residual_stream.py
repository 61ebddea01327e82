"""The hidden states of a pass, which every layer adds to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.model.models.draft_inputs import Taps
from tokenmill.model.models.norm import Norm

if TYPE_CHECKING:
    import torch


class ResidualStream:
    """The hidden states of a pass: what blocks add to, and the last block's output, which the next norm adds.

    Attributes:
        hidden: [T, hidden_size].
        delta: [T, hidden_size] still to be added to it, times `scale`; or None.
        given: [layers, T, size], the layers' own embeddings; None: they have none.
        embeddings: [T, hidden_size], of the tokens behind the hidden states; None but in a draft head.
    """

    __slots__ = ("_taps", "delta", "embeddings", "given", "hidden", "scale")

    def __init__(
        self,
        hidden: torch.Tensor,
        given: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
        taps: Taps | None = None,
    ) -> None:
        self.hidden = hidden
        self.given = given
        self.embeddings = embeddings
        self._taps = taps
        self.delta: torch.Tensor | None = None
        self.scale = 1.0

    def normed(self, norm: Norm | None) -> torch.Tensor:
        """Add what is still to be added, and return the norm of the sum: one pass over memory for both.

        Without a norm return the sum itself, which must not be written to.
        """
        if norm is None:
            return self.hidden if self.delta is None else self.hidden.add_(self.delta, alpha=self.scale)
        return norm.forward(self.hidden, self.delta, self.scale)

    def renew(self, norm: Norm) -> None:
        """Let the norm of the sum take the place of the hidden states."""
        self.hidden, self.delta = self.normed(norm), None

    def pass_boundary(self) -> None:
        """Let the taps have what all layers so far have made, once it has been added up."""
        if self._taps is not None:
            self._taps.take(self.hidden)

    def keep(self, only: torch.Tensor) -> None:
        """Keep only these tokens."""
        self.hidden = self.hidden.index_select(0, only)
        self.given = None if self.given is None else self.given.index_select(1, only)
