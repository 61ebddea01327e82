"""`Sampler`: logits of a step in, one token per row out.

In vLLM's order: log probabilities are taken from the raw logits; then logit bias, penalties, the mask of stop ids
before min_tokens, the masks of grammars, temperature, min-p, top-k, top-p, and the draw with the row's one uniform
number. Rows that are told to draw again do so from the same logits under a mask, with another number. Knows nothing of
requests, plans or steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenmill.kernels import native_ops
from tokenmill.sampling.allowed import AllowedTokens, ban_others
from tokenmill.sampling.batch import DrawGroup, LogitEntries, SamplingBatch
from tokenmill.sampling.candidates import finite, first_argmax
from tokenmill.sampling.draw import draw_filtered, draw_plain
from tokenmill.sampling.logprobs import LogprobTensors, take_logprobs
from tokenmill.sampling.penalties import apply_penalties
from tokenmill.sampling.token_rules import apply_rules
from tokenmill.sampling.weights import rows_at_once
from tokenmill.sampling.wide import WideDraw, draw_wide

if TYPE_CHECKING:
    from tokenmill import _native


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The outcome of one `Sampler.sample`.

    Attributes:
        token_ids: [S] int64, on the device of the logits.
        logprobs: of the rows that asked; None if none did.
    """

    token_ids: Tensor
    logprobs: LogprobTensors | None


@dataclass(frozen=True, slots=True)
class SecondDraw:
    """Rows whose first token was refused; n of them.

    Attributes:
        allowed: which rows of the logits, and what is left to them.
        batch: how they draw now, in the same order.
    """

    allowed: AllowedTokens
    batch: SamplingBatch


# Looks at what was drawn ([S] int64); None: nobody draws again.
Review = Callable[[Tensor], SecondDraw | None]


class Sampler:
    """Samples on any device; keeps no state between steps.

    Args:
        native: kernels that draw on the CPU, where there are any.
    """

    def __init__(self, native: _native.Kernels | None = None) -> None:
        self._native = native

    def sample(
        self, logits: Tensor, batch: SamplingBatch, token_table: Tensor, review: Review | None = None
    ) -> SampledTokens:
        """Sample one token for each row.

        Logits that are NaN or infinite give some token of the vocabulary, never an error: greedy rows take a NaN for
        the largest, as argmax does, and drawing rows never take one while another token is left.

        Args:
            logits: [S, V] float32; overwritten.
            token_table: [max_rows, max_len] integers on the device, prompt and output ids of each row of the table.
            review: says which rows draw again.
        """
        if batch.only_argmax and batch.allowed is None and review is None:
            return SampledTokens(first_argmax(logits), None)
        processed = process(logits, batch, token_table, self._native)
        token_ids = self._draw(processed, batch)
        second = None if review is None else review(token_ids)
        if second is not None:
            self.sample_again(token_ids, processed[second.allowed.indices], second)
        if batch.logprobs is None:
            return SampledTokens(token_ids, None)
        return SampledTokens(token_ids, take_logprobs(logits, token_ids, batch.logprobs))

    def sample_again(self, token_ids: Tensor, processed: Tensor, second: SecondDraw) -> None:
        """Replace the tokens of rows that were refused theirs.

        Args:
            token_ids: [S] int64, changed in place.
            processed: [n, V] float32, what these rows drew from; overwritten.
        """
        rows = torch.arange(len(processed), device=processed.device)
        ban_others(processed, AllowedTokens(rows, second.allowed.bits), self._native)
        token_ids[second.allowed.indices] = self._draw(processed, second.batch)

    def _draw(self, processed: Tensor, batch: SamplingBatch) -> Tensor:
        token_ids = torch.empty(batch.size, dtype=torch.int64, device=processed.device)
        if batch.greedy is not None:
            token_ids[batch.greedy] = first_argmax(_rows(processed, batch.greedy))
        for draw, group in (
            (_draw_plain, batch.plain),
            (_draw_within_candidates if batch.filtered_within_candidates else _draw_filtered, batch.filtered),
            (_draw_wide, batch.wide),
        ):
            if group is not None and self._native is not None:
                token_ids[group.indices] = native_ops.draw(self._native, processed, group)
            elif group is not None:
                for part in group.parts(rows_at_once(processed)):
                    token_ids[part.indices] = draw(finite(_rows(processed, part.indices)), part)
        return token_ids


def process(logits: Tensor, batch: SamplingBatch, token_table: Tensor, native: _native.Kernels | None = None) -> Tensor:
    """The logits that tokens are drawn from, with everything before the temperature applied.

    In place; a copy only where log probabilities are still to be taken from the logits as they came.
    """
    if all(part is None for part in (batch.bias, batch.penalties, batch.banned, batch.allowed, batch.rules)):
        return logits
    processed = logits if batch.logprobs is None else logits.clone()
    if batch.bias is not None:
        processed[batch.bias.indices, batch.bias.token_ids] += batch.bias.values
    if batch.penalties is not None:
        apply_penalties(processed, batch.penalties, token_table)
    if batch.banned is not None:
        _ban(processed, batch.banned)
    if batch.allowed is not None:
        ban_others(processed, batch.allowed, native)
    if batch.rules is not None:
        apply_rules(processed, batch.rules, token_table, native)
    return processed


def _ban(logits: Tensor, entries: LogitEntries) -> None:
    logits[entries.indices, entries.token_ids] = entries.values


def _draw_plain(logits: Tensor, group: DrawGroup) -> Tensor:
    return draw_plain(logits, group.temperature, group.uniform)


def _draw_within_candidates(logits: Tensor, group: DrawGroup) -> Tensor:
    return draw_filtered(logits, group, within_candidates=True)[0]


def _draw_filtered(logits: Tensor, group: DrawGroup) -> Tensor:
    token_ids, is_complete = draw_filtered(logits, group, within_candidates=False)
    incomplete = (~is_complete).nonzero().squeeze(1)
    if len(incomplete):
        token_ids[incomplete] = _draw_members_wide(logits, group, incomplete.tolist())
    return token_ids


def _draw_wide(logits: Tensor, group: DrawGroup) -> Tensor:
    return _draw_members_wide(logits, group, list(range(len(logits))))


def _draw_members_wide(logits: Tensor, group: DrawGroup, members: list[int]) -> Tensor:
    """Token ids of those members of a group, whose rows are `logits`, that need the long way."""
    return torch.stack(
        [
            draw_wide(
                logits[member],
                WideDraw(
                    temperature=float(group.temperature[member]),
                    top_k=int(group.top_k[member]),
                    top_p=float(group.top_p[member]),
                    min_p=float(group.min_p[member]),
                    uniform=float(group.uniform[member]),
                ),
            )
            for member in members
        ]
    )


def _rows(logits: Tensor, indices: Tensor) -> Tensor:
    """The named rows; a group of all rows is in their order, and needs no copy."""
    return logits if len(indices) == len(logits) else logits[indices]
