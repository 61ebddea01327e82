"""`Sampler`: logits of a step in, one token per row out.

In vLLM's order: log probabilities are taken from the raw logits; then logit bias, penalties, the mask of stop ids
before min_tokens, the bitmasks of grammars and the rows' own rules, temperature, min-p, top-k, top-p, and the draw with
the row's uniform number. Knows nothing of requests, plans or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from tokenmill.model.sampling import reference
from tokenmill.model.sampling.bitmask import TokenBitmask, allows, apply_bitmask
from tokenmill.model.sampling.draws import NO_TOKEN, NUM_FIELDS, redraws
from tokenmill.model.sampling.logprobs import LogprobTensors, take_logprobs
from tokenmill.model.sampling.processors import add_entries, apply_bad_words, apply_penalties, moved
from tokenmill.model.sampling.state import SamplingMetadata

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import Array

# In place of a token that cannot be drawn, though the model's logits are numbers; `NO_TOKEN` says that these are not.
NOTHING_LEFT = NO_TOKEN - 1

DrawKernel = Callable[[Tensor, Tensor], Tensor]
"""Logits [S, V] and packed draws [S, NUM_FIELDS] -> token ids [S] int64; see `reference.draw`. Logits are float32, but
those of a `Drawn` may come to its kernel as any float."""


class Head(Protocol):
    """The output head of a model."""

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits: [S, hidden_size] -> [S, vocab_size] float32."""

    def argmax(self, outputs: Tensor) -> Tensor:
        """Return the token of the largest logit: [S, hidden_size] -> [S] int64; -1 where logits are NaN or infinite."""


class Masks(Protocol):
    """Token bitmasks that come while a step runs: the grammars of its rows."""

    def ready(self, device: torch.device) -> TokenBitmask | None:
        """Return the masks filled by now, of the rows that draw under their mask at once."""

    def deciding(self, token_ids: Tensor) -> TokenBitmask | None:
        """Return, after `ready`, those of the rows that redraw where their mask rejects the token of [S] int64."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """The model's outputs [S, hidden_size] that S rows sample from on the host; logits are made as needed.

    Attributes:
        adapted: rows whose head is not the model's own, [n] int64, increasing, with this head.
    """

    head: Head
    hidden: Tensor
    adapted: Sequence[tuple[Tensor, Head]] = ()

    def logits(self, rows: Tensor | None = None) -> Tensor:
        """Return logits of some of the rows, [n] int64, or of all."""
        logits = self.head.logits(self._of(rows))
        for places, (own, head) in self._places(rows):
            logits[places] = head.logits(self.hidden[own])
        return logits

    def argmax(self, rows: Tensor | None = None) -> Tensor:
        """Return the token of each row's largest logit, [n] int64; see `Head.argmax`."""
        token_ids = self.head.argmax(self._of(rows))
        for places, (own, head) in self._places(rows):
            token_ids[places] = head.argmax(self.hidden[own])
        return token_ids

    def _of(self, rows: Tensor | None) -> Tensor:
        return self.hidden if rows is None else self.hidden[rows]

    def _places(self, rows: Tensor | None) -> Iterator[tuple[Tensor, tuple[Tensor, Head]]]:
        """Yield the places among `rows` of those with a head of their own, and these rows with the head."""
        for own, head in self.adapted:
            if rows is None:
                yield own, (own, head)
            else:
                places = torch.isin(rows, own).nonzero().squeeze(1)
                if len(places):
                    yield places, (rows[places], head)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Logits, draws and tokens of S rows on a device that the host does not wait for.

    Attributes:
        logits: [S, V] of any float; overwritten if they are float32, else widened where a row asks for more.
        draws: [S, NUM_FIELDS] int64, the packed draws.
        token_ids: [S] int64, the result of `Sampler.draw` for these, perhaps in a graph.
    """

    logits: Tensor
    draws: Tensor
    token_ids: Tensor


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that S rows sampled.

    Attributes:
        token_ids: [S] int64, on the device of the logits; `NO_TOKEN` where the model's logits are NaN or infinite,
            `NOTHING_LEFT` where masks and rules leave none of them.
        logprobs: of the rows that asked; None if none did.
    """

    token_ids: Tensor
    logprobs: LogprobTensors | None = None


class Sampler:
    """Samples on any device; keeps no state between steps.

    Args:
        draw: how tokens are drawn there.
        native: kernels that apply bitmasks and take log probabilities on the CPU, and draw if `draw` is not given;
            None: torch does.
    """

    def __init__(self, draw: DrawKernel | None = None, native: _native.Kernels | None = None) -> None:
        self.draw = draw or (reference.draw if native is None else partial(draw_natively, native))
        self._native = native

    def sample(
        self,
        source: Outputs | Drawn,
        metadata: SamplingMetadata,
        token_table: Array,
        masks: Masks | None = None,
    ) -> SampledTokens:
        """Sample one token for each row.

        Args:
            token_table: [max_rows, max_len] integers, prompt and output ids of each row of the tables.
        """
        if isinstance(source, Drawn):
            return self._sample_drawn(source, metadata, token_table, masks)
        sampled = self._sample_outputs(source, metadata, token_table, masks)
        broken = (sampled.token_ids < 0).nonzero().squeeze(1)
        if len(broken):
            is_number = source.argmax(broken) >= 0
            sampled.token_ids[broken] = torch.where(is_number, NOTHING_LEFT, NO_TOKEN)
        return sampled

    def _sample_outputs(
        self, source: Outputs, metadata: SamplingMetadata, token_table: Array, masks: Masks | None
    ) -> SampledTokens:
        # Greedy rows draw before their mask, which decides afterwards: as a rule, then, none is asked for here.
        if not metadata.only_argmax or (masks is not None and masks.ready(source.hidden.device) is not None):
            return self.sample_logits(source.logits(), metadata, token_table, masks)
        # The logits themselves are not needed: kernels may find the largest without writing them down.
        token_ids = source.argmax()
        if masks is not None:
            draws = torch.from_numpy(metadata.draws)
            token_ids = self._redrawn(token_ids, source.logits, draws, masks)
        return SampledTokens(token_ids)

    def _sample_drawn(
        self, source: Drawn, metadata: SamplingMetadata, token_table: Array, masks: Masks | None
    ) -> SampledTokens:
        drawn = source.token_ids
        if masks is None and not metadata.needs_processing:
            return SampledTokens(drawn)
        sampled = self.sample_logits(source.logits.float(), metadata, token_table, masks, source)
        # What the logits alone gave says whether they are numbers.
        token_ids = sampled.token_ids.where(sampled.token_ids >= 0, NOTHING_LEFT).where(drawn >= 0, NO_TOKEN)
        return SampledTokens(token_ids, sampled.logprobs)

    def sample_logits(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        token_table: Array,
        masks: Masks | None = None,
        drawn: Drawn | None = None,
    ) -> SampledTokens:
        """Sample from logits [S, V] float32, which are overwritten; `NO_TOKEN` where no token can be drawn.

        Bias, penalties and masks keep a NaN, or make one of +inf, so that the draw shows it.

        Args:
            drawn: tokens already drawn from the unchanged logits.
        """
        draws = torch.from_numpy(metadata.draws) if drawn is None else drawn.draws
        mask = None if masks is None else masks.ready(logits.device)
        processed = self._process(logits, metadata, mask, token_table)
        if drawn is None or mask is not None or metadata.changes_logits:
            token_ids = self.draw(processed, draws)
        else:
            token_ids = drawn.token_ids
        if masks is not None:
            token_ids = self._redrawn(token_ids, lambda rows: processed[rows], draws, masks)
        if metadata.logprobs is None:
            return SampledTokens(token_ids)
        return SampledTokens(token_ids, take_logprobs(logits, token_ids, metadata.logprobs, self._native))

    def _process(
        self, logits: Tensor, metadata: SamplingMetadata, mask: TokenBitmask | None, token_table: Array
    ) -> Tensor:
        """Return the logits that tokens are drawn from, with everything before the temperature applied.

        Works in place, with a copy only if log probabilities are still to be taken from the raw logits.
        """
        if not metadata.changes_logits and mask is None:
            return logits
        processed = logits if metadata.logprobs is None else logits.clone()
        on_host = logits.device.type == "cpu"
        own, table = (processed.numpy(), np.asarray(token_table)) if on_host else (processed, token_table)
        if metadata.bias is not None:
            add_entries(own, metadata.bias)
        if metadata.penalties is not None:
            apply_penalties(own, metadata.penalties, table)
        if metadata.stops is not None:
            add_entries(own, metadata.stops)
        if mask is not None:
            apply_bitmask(processed, mask, self._native)
        if metadata.allowed_tokens is not None:
            apply_bitmask(processed, moved(metadata.allowed_tokens, logits), self._native)
        if metadata.bad_words is not None:
            apply_bad_words(own, metadata.bad_words, table)
        return processed

    def _redrawn(self, token_ids: Tensor, processed: Callable[[Tensor], Tensor], draws: Tensor, masks: Masks) -> Tensor:
        """Return token ids [S], drawn again where a mask that came after the draw does not have them.

        Args:
            processed: rows [n] -> the logits [n, V] that these drew from, to be overwritten.
        """
        mask = masks.deciding(token_ids)
        if mask is None:
            return token_ids
        rows, left = mask.indices, processed(mask.indices)
        apply_bitmask(left, TokenBitmask(torch.arange(len(rows), device=rows.device), mask.bits), self._native)
        second, first = self.draw(left, redraws(draws[rows])), token_ids[rows]
        return token_ids.index_copy(0, rows, torch.where(allows(mask, first.clamp(min=0)), first, second))


def draw_natively(native: _native.Kernels, logits: Tensor, draws: Tensor) -> Tensor:
    """Draw as `reference.draw`, by the kernels of `native/isa/draw.cpp`."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "rows of float32 in one piece"
    assert draws.dtype == torch.int64 and draws.shape == (len(logits), NUM_FIELDS), "a packed draw for each row"
    assert draws.is_contiguous(), "packed draws are in one piece"
    count, size = logits.shape
    token_ids = torch.empty(count, dtype=torch.int64)
    native.draw(logits.data_ptr(), logits.stride(0), size, count, draws.data_ptr(), token_ids.data_ptr())
    return token_ids
