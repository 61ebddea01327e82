"""`SamplingBatch`: what one step needs of the rows that sample, ready on the device.

The rows are sorted into groups by what has to be done for them, so that a row pays only for the features it uses. An
index tensor names rows of the logits (0..S-1); a group of which no row is a member is None. Plain data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from tokenmill.sampling.allowed import AllowedTokens
from tokenmill.sampling.token_rules import TokenRules


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Rows that draw at random; n of them.

    Attributes:
        indices: [n] int64, rows of the logits.
        temperature, top_p, min_p, uniform: [n] float64.
        top_k: [n] int64; the size of the vocabulary where it is off.
    """

    indices: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    def parts(self, size: int) -> Iterator[DrawGroup]:
        """The same rows in order, at most `size` in each group."""
        fields = (self.indices, self.temperature, self.top_k, self.top_p, self.min_p, self.uniform)
        for part in zip(*(field.split(size) for field in fields), strict=True):
            yield DrawGroup(*part)


@dataclass(frozen=True, slots=True)
class PenaltyGroup:
    """Rows with a penalty; n of them.

    Attributes:
        indices: [n] int64, rows of the logits.
        table_rows: [n] int64, rows of the token table.
        num_prompt_tokens, positions: [n] int64; the output so far lies between them.
        presence, frequency, repetition: [n] float32.
        length: the largest of `positions`, known to the host.
    """

    indices: Tensor
    table_rows: Tensor
    num_prompt_tokens: Tensor
    positions: Tensor
    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    length: int


@dataclass(frozen=True, slots=True)
class LogitEntries:
    """Single logits: [m] int64 rows of the logits, [m] int64 token ids, [m] float32 values; no pair occurs twice."""

    indices: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class LogprobGroup:
    """Rows that report log probabilities: [n] int64 rows of the logits, and how many likely tokens each asked for."""

    indices: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """S rows that sample in this step.

    Attributes:
        size: S.
        only_argmax: every row is greedy and none has an extra, a grammar aside: the other groups are None.
        greedy: [n] int64, rows that take the argmax of the processed logits.
        plain: rows that draw from the whole vocabulary.
        filtered: rows with top-k, top-p or min-p.
        filtered_within_candidates: all of `filtered` have a top-k small enough for the candidate list.
        wide: rows with a top-k too large for it.
        bias: values to add; banned: logits to set to -inf (the values are -inf).
        allowed: what grammars leave of the vocabulary.
        rules: what the requests themselves leave of it.
    """

    size: int
    only_argmax: bool
    greedy: Tensor | None = None
    plain: DrawGroup | None = None
    filtered: DrawGroup | None = None
    filtered_within_candidates: bool = False
    wide: DrawGroup | None = None
    penalties: PenaltyGroup | None = None
    bias: LogitEntries | None = None
    banned: LogitEntries | None = None
    logprobs: LogprobGroup | None = None
    allowed: AllowedTokens | None = None
    rules: TokenRules | None = None
