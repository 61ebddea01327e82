"""`DraftHeadSpec`: the parts and sizes of a draft head, a decoder of one layer that drafts from hidden states."""

from __future__ import annotations

from typing import Literal

import msgspec

TapNorm = Literal["none", "together", "apart"]


class DraftHeadSpec(msgspec.Struct, frozen=True):
    """An EAGLE-3 head (Li et al., arXiv 2503.01840), or a model's own layer for multi-token prediction.

    Attributes:
        num_taps: hidden states of its target that it takes for each token.
        tapped_size: size of each.
        boundaries: behind how many of the target's layers they are taken, behind all of them normed; None: its config
            does not say.
        vocab_size: tokens that it may draft.
        tap_norm: how they are normed: all as one vector, each by itself, or not at all.
        recycles_normed: the next draft begins with the normed output of the one before; else with what is normed.
        has_embedding: it embeds tokens by itself; else as its target does.
        has_head: it has an output head; else that of its target is its own.
        projects_pairs: a token's embedding and the hidden state before it are normed and projected to one vector, which
            the layer takes (MTP); else the layer takes both side by side.
    """

    num_taps: int
    tapped_size: int
    boundaries: tuple[int, ...] | None
    vocab_size: int
    tap_norm: TapNorm = "none"
    recycles_normed: bool = False
    has_embedding: bool = False
    has_head: bool = True
    projects_pairs: bool = False

    def num_parameters(self, hidden_size: int) -> int:
        """Return the number of parameters that turn the taps of a token into one vector."""
        if self.projects_pairs:
            return 2 * hidden_size * (hidden_size + 1)
        width = self.num_taps * self.tapped_size
        return width * hidden_size + (width if self.tap_norm != "none" else 0)
