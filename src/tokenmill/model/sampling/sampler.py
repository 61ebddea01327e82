"""`Sampler`: logits of a step in, one token per row out.

In vLLM's order: log probabilities are taken from the raw logits; then logit bias, penalties, the mask of stop ids
before min_tokens, the bitmasks of grammars and the rows' own rules, temperature, min-p, top-k, top-p, and the draw with
the row's uniform number. Knows nothing of requests, plans or steps. Arrays are the host's or a device's: which of the
two, only the draws and what single modules do with them know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.model.sampling.bitmask import TokenBitmask, allows, apply_bitmask
from tokenmill.model.sampling.draws import NO_TOKEN, NUM_FIELDS, PackedDraws, redraws
from tokenmill.model.sampling.logprobs import LogprobArrays, take_logprobs
from tokenmill.model.sampling.processors import add_entries, apply_bad_words, apply_penalties, moved
from tokenmill.model.sampling.state import SamplingMetadata
from tokenmill.model.sampling.time_marks import apply_time_marks
from tokenmill.platform.arrays import address
from tokenmill.platform.host_arrays import library_of

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.model.kernels.adapter_parts import HeadAddition
    from tokenmill.platform.arrays import Array, ArrayLibrary

    DrawKernel = Callable[[Array, Array], Array]
    """Logits [S, V] and packed draws [S, NUM_FIELDS] -> token ids [S] int64; see `reference.draw`. Logits are float32,
    but those of a `Drawn` may come to its kernel as any float."""

# In place of a token that cannot be drawn, though the model's logits are numbers; `NO_TOKEN` says that these are not.
NOTHING_LEFT = NO_TOKEN - 1


class Head(Protocol):
    """The output head of a model on the host. What its outputs are made of, only the model knows."""

    def logits(self, outputs: Array) -> Array:
        """Return logits: [S, hidden_size] -> [S, vocab_size] float32."""

    def argmax(self, outputs: Array) -> Array:
        """Return the token of the largest logit: [S, hidden_size] -> [S] int64; -1 where logits are NaN or infinite."""


class AdaptedHead:
    """The head of a model with a row's addition."""

    def __init__(self, head: Head, addition: HeadAddition) -> None:
        self._head = head
        self._addition = addition

    def logits(self, outputs: Array) -> Array:
        """Return the model's logits in float32 with the addition."""
        logits = self._head.logits(outputs)
        return self._addition.add(outputs, library_of(logits).astype(logits, "float32"))

    def argmax(self, outputs: Array) -> npt.NDArray[np.int64]:
        """Return the tokens with the largest adapted logits; -1 where logits are NaN or infinite."""
        logits = self.logits(outputs)
        token_ids = logits.argmax(1)
        highest = logits[np.arange(len(token_ids)), token_ids]  # a NaN, if there is one
        return np.where(np.isfinite(highest), token_ids, NO_TOKEN)


class Masks(Protocol):
    """Token bitmasks that come while a step runs: the grammars of its rows."""

    def ready(self, arrays: ArrayLibrary) -> TokenBitmask | None:
        """Return the masks filled by now, of the rows that draw under their mask at once, as arrays of a library."""

    def deciding(self, token_ids: Array) -> TokenBitmask | None:
        """Return, after `ready`, those of the rows that redraw where their mask rejects the token of [S] int64."""


class Outputs(msgspec.Struct, frozen=True):
    """The model's outputs [S, hidden_size] that S rows sample from on the host; logits are made as needed.

    Attributes:
        adapted: rows whose head is not the model's own, [n] int64, increasing, with this head.
    """

    head: Head
    hidden: Array
    adapted: Sequence[tuple[npt.NDArray[np.int64], Head]] = ()

    def logits(self, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.float32]:
        """Return logits of some of the rows, [n] int64, or of all."""
        logits = self.head.logits(self._of(rows))
        for places, own, head in self._places(rows):
            logits[places] = head.logits(self.hidden[own])
        return logits

    def argmax(self, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """Return the token of each row's largest logit, [n] int64; see `Head.argmax`."""
        token_ids = self.head.argmax(self._of(rows))
        for places, own, head in self._places(rows):
            token_ids[places] = head.argmax(self.hidden[own])
        return token_ids

    def _of(self, rows: npt.NDArray[np.int64] | None) -> Array:
        return self.hidden if rows is None else self.hidden[rows]

    def _places(
        self, rows: npt.NDArray[np.int64] | None
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Head]]:
        """Yield the places among `rows` of those with a head of their own, these rows, and the head."""
        for own, head in self.adapted:
            if rows is None:
                yield own, own, head
            else:
                places = np.flatnonzero(np.isin(rows, own))
                if len(places):
                    yield places, rows[places], head


class Drawn(msgspec.Struct, frozen=True):
    """Logits, draws and tokens of S rows on a device that the host does not wait for.

    Attributes:
        logits: [S, V] of any float; overwritten if they are float32, else widened where a row asks for more.
        draws: [S, NUM_FIELDS] int64, the packed draws.
        token_ids: [S] int64, the result of `Sampler.draw` for these, perhaps in a graph.
    """

    logits: Array
    draws: Array
    token_ids: Array


class SampledTokens(msgspec.Struct, frozen=True):
    """The tokens that S rows sampled.

    Attributes:
        token_ids: [S] int64, where the logits are; `NO_TOKEN` where the model's logits are NaN or infinite,
            `NOTHING_LEFT` where masks and rules leave none of them.
        logprobs: of the rows that asked; None if none did.
    """

    token_ids: Array
    logprobs: LogprobArrays | None = None


class Sampler:
    """Samples on any device; keeps no state between steps.

    Args:
        draw: how tokens are drawn there; None: on the host.
        native: kernels that penalize, mask, draw and take log probabilities on the host; None: NumPy and torch do.
    """

    def __init__(self, draw: DrawKernel | None = None, native: _native.Kernels | None = None) -> None:
        self.draw = draw or _draw_on_host(native)
        self._native = native

    def sample(
        self, source: Outputs, metadata: SamplingMetadata, token_table: Array, masks: Masks | None = None
    ) -> SampledTokens:
        """Sample one token for each row on the host.

        Args:
            token_table: [max_rows, max_len] integers, prompt and output ids of each row of the tables.
        """
        sampled = self._sample_outputs(source, metadata, token_table, masks)
        broken = np.flatnonzero(sampled.token_ids < 0)
        if len(broken):
            is_number = source.argmax(broken) >= 0
            sampled.token_ids[broken] = np.where(is_number, NOTHING_LEFT, NO_TOKEN)
        return sampled

    def _sample_outputs(
        self, source: Outputs, metadata: SamplingMetadata, token_table: Array, masks: Masks | None
    ) -> SampledTokens:
        # Greedy rows draw before their mask, which decides afterwards: as a rule, then, none is asked for here.
        if not metadata.only_argmax or (masks is not None and masks.ready(library_of(metadata.draws)) is not None):
            return self.sample_logits(source.logits(), metadata, token_table, masks)
        # The logits themselves are not needed: kernels may find the largest without writing them down.
        token_ids: Array = source.argmax()
        if masks is not None:
            token_ids = self._redrawn(token_ids, source.logits, metadata.draws, masks)
        return SampledTokens(token_ids)

    def sample_logits(
        self,
        logits: Array,
        metadata: SamplingMetadata,
        token_table: Array,
        masks: Masks | None = None,
        draws: Array | None = None,
        drawn: Array | None = None,
    ) -> SampledTokens:
        """Sample from logits [S, V] float32, which are overwritten; `NO_TOKEN` where no token can be drawn.

        Bias, penalties and masks keep a NaN, or make one of +inf, so that the draw shows it.

        Args:
            draws: the packed draws of the metadata where the logits are; None: they are on the host.
            drawn: tokens already drawn from the unchanged logits.
        """
        xp = library_of(logits)
        draws = xp.from_host(metadata.draws) if draws is None else draws
        mask = None if masks is None else masks.ready(xp)
        processed = self._process(logits, metadata, mask, token_table)
        if drawn is None or mask is not None or metadata.changes_logits:
            drawn = self.draw(processed, draws)
        if masks is not None:
            drawn = self._redrawn(drawn, lambda rows: processed[rows], draws, masks)
        if metadata.logprobs is None:
            return SampledTokens(drawn)
        return SampledTokens(drawn, take_logprobs(logits, drawn, metadata.logprobs, self._native))

    def _process(
        self, logits: Array, metadata: SamplingMetadata, mask: TokenBitmask | None, token_table: Array
    ) -> Array:
        """Return the logits that tokens are drawn from, with everything before the temperature applied.

        Works in place, with a copy only if log probabilities are still to be taken from the raw logits.
        """
        if not metadata.changes_logits and mask is None:
            return logits
        processed = logits if metadata.logprobs is None else library_of(logits).copy(logits)
        if metadata.bias is not None:
            add_entries(processed, metadata.bias)
        if metadata.penalties is not None:
            apply_penalties(processed, metadata.penalties, token_table, self._native)
        if metadata.stops is not None:
            add_entries(processed, metadata.stops)
        if mask is not None:
            apply_bitmask(processed, mask, self._native)
        if metadata.allowed_tokens is not None:
            apply_bitmask(processed, moved(metadata.allowed_tokens, logits), self._native)
        if metadata.bad_words is not None:
            apply_bad_words(processed, metadata.bad_words, token_table)
        if metadata.time_marks is not None:
            apply_time_marks(processed, metadata.time_marks, token_table)
        return processed

    def _redrawn(self, token_ids: Array, processed: Callable[[Array], Array], draws: Array, masks: Masks) -> Array:
        """Return token ids [S], drawn again where a mask that came after the draw does not have them.

        Args:
            processed: rows [n] -> the logits [n, V] that these drew from, to be overwritten.
        """
        mask = masks.deciding(token_ids)
        if mask is None:
            return token_ids
        xp, rows = library_of(token_ids), mask.indices
        left = processed(rows)
        apply_bitmask(left, TokenBitmask(xp.arange(len(rows), "int64"), mask.bits), self._native)
        first, second = token_ids[rows], self.draw(left, redraws(draws, rows))
        again = xp.copy(token_ids)
        again[rows] = xp.where(allows(mask, xp.at_least(first, 0)), first, second)
        return again


def sample_drawn(
    sampler: Sampler, source: Drawn, metadata: SamplingMetadata, token_table: Array, masks: Masks | None = None
) -> SampledTokens:
    """Sample again where a row asks for more than its draw; see `Sampler.sample_logits`."""
    drawn = source.token_ids
    if masks is None and not metadata.needs_processing:
        return SampledTokens(drawn)
    xp = library_of(drawn)
    logits = xp.astype(source.logits, "float32")
    sampled = sampler.sample_logits(logits, metadata, token_table, masks, source.draws, drawn)
    token_ids = xp.where(sampled.token_ids >= 0, sampled.token_ids, NOTHING_LEFT)
    # What the logits alone gave says whether they are numbers.
    token_ids = xp.where(drawn >= 0, token_ids, NO_TOKEN)
    return SampledTokens(token_ids, sampled.logprobs)


def _draw_on_host(native: _native.Kernels | None) -> DrawKernel:
    if native is not None:
        return partial(draw_natively, native)
    from tokenmill.model.sampling import reference  # needs torch

    return reference.draw_on_host


def draw_natively(
    native: _native.Kernels, logits: npt.NDArray[np.float32], draws: PackedDraws
) -> npt.NDArray[np.int64]:
    """Draw as `reference.draw_on_host`, by the kernels of `native/isa/draw.cpp`."""
    assert logits.dtype == np.float32 and logits.strides[1] == 4, "rows of float32 in one piece"
    assert draws.dtype == np.int64 and draws.shape == (len(logits), NUM_FIELDS), "a packed draw for each row"
    assert draws.flags.c_contiguous, "packed draws are in one piece"
    count, size = logits.shape
    token_ids = np.empty(count, dtype=np.int64)
    native.draw(address(logits), logits.strides[0] // 4, size, count, address(draws), address(token_ids))
    return token_ids
