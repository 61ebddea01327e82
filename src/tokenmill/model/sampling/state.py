"""`SamplingState`: the sampling parameters of every row, and `SamplingMetadata`: what one step needs of them.

One record per row, always written whole, so that a reused row keeps nothing of its former owner. All of it is on the
host. Knows the vocabulary's size, not the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import AdmittedRequest, StepPlan
from tokenmill.core.sampling_params import SamplingParams, TimeRules
from tokenmill.model.attention.row_extension import Arrays, RowExtension
from tokenmill.model.sampling.bitmask import WORD_BITS, TokenBitmask
from tokenmill.model.sampling.draws import RECORD, PackedDraws, describe, keys_of, pack, uniforms
from tokenmill.model.sampling.logprobs import LogprobGroup
from tokenmill.model.sampling.processors import PADDING, BadWords, LogitEntries, Penalties
from tokenmill.model.sampling.time_marks import TimeMarks

MAX_LOGIT_BIAS = 100.0
# A factor outside of this range is 0 or infinite in float32, or makes logits so.
REPETITION_RANGE = (1e-30, 1e30)

IntArray = npt.NDArray[np.integer]
# Token ids and the value for each of them.
Entries = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
_NO_ENTRIES: Entries = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)


class Extra(IntFlag):
    """Options of a row besides its draw."""

    BIAS = 1
    PENALTIES = 2
    MIN_TOKENS = 4
    ALLOWED_TOKENS = 8
    BAD_WORDS = 16
    LOGPROBS = 32
    TIME_MARKS = 64


_EXTRAS = np.dtype(
    [
        ("flags", np.int64),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("num_prompt_tokens", np.int64),
        ("first_stop_position", np.int64),
        ("num_logprobs", np.int64),
    ],
    align=True,
)


class SamplingMetadata(msgspec.Struct, frozen=True):
    """Sampling parameters of S rows in a step. Fields that no row asks for are None.

    Attributes:
        draws: [S, NUM_FIELDS] int64, packed: see `draws`.
        only_argmax: every row is greedy and asks for nothing else: the logits themselves are not needed.
        bias, stops: values to add to logits; those of `stops` are -inf.
        allowed_tokens, bad_words, time_marks: limits that requests themselves set on the vocabulary.
    """

    draws: PackedDraws
    only_argmax: bool
    bias: LogitEntries | None = None
    penalties: Penalties | None = None
    stops: LogitEntries | None = None
    allowed_tokens: TokenBitmask | None = None
    bad_words: BadWords | None = None
    logprobs: LogprobGroup | None = None
    time_marks: TimeMarks | None = None

    @property
    def changes_logits(self) -> bool:
        """True if some row draws from other logits than the model's."""
        parts = (self.bias, self.penalties, self.stops, self.allowed_tokens, self.bad_words, self.time_marks)
        return any(part is not None for part in parts)

    @property
    def needs_processing(self) -> bool:
        """True if rows ask for more than their draws: other logits, or log probabilities."""
        return self.changes_logits or self.logprobs is not None


class _Selection(msgspec.Struct, frozen=True):
    """The part of a selection of S rows that does not depend on their positions.

    Attributes:
        keys: [2, S], of their numbers; None: all rows are greedy.
        first_stops: [S], the position from which on a row may stop.
        metadata: with positions of 0 and numbers of 0, as if it were too early for all rows to stop.
    """

    keys: npt.NDArray[np.uint64] | None
    first_stops: IntArray
    metadata: SamplingMetadata


class SamplingState(RowExtension):
    """Sampling parameters of up to `max_rows` rows for a vocabulary of `vocab_size` tokens."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._draws = np.zeros(max_rows, dtype=RECORD)
        self._seeds = np.zeros(max_rows, dtype=np.uint64)
        self._extras = np.zeros(max_rows, dtype=_EXTRAS)
        self._bias: list[Entries] = [_NO_ENTRIES] * max_rows
        self._stops: list[Entries] = [_NO_ENTRIES] * max_rows
        self._allowed: list[npt.NDArray[np.int32] | None] = [None] * max_rows
        self._bad_words: list[tuple[tuple[int, ...], ...]] = [()] * max_rows
        self._time_rules: TimeRules | None = None
        # The same rows sample in step after step.
        self._last: tuple[bytes, _Selection] | None = None

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in the parameters of new rows."""
        for new_row in plan.new_rows:
            self.set(new_row)
        return {}

    def set(self, new_row: AdmittedRequest) -> None:
        """Make `new_row.row` the row of this request; every field is overwritten."""
        params, row = new_row.params, new_row.row
        # A grammar's own mask keeps stop ids out: it knows where nothing else is allowed.
        stop_ids = new_row.stop_token_ids if params.min_tokens and params.grammar is None else ()
        stop_ids = tuple(dict.fromkeys((*stop_ids, *params.first_bad_ids)))
        self._last = None
        self._draws[row] = describe(params, self.vocab_size)._replace(row=row)
        self._seeds[row] = new_row.seed & (2**64 - 1)
        bias = [min(max(value, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS) for value in params.logit_bias.values()]
        self._bias[row] = _entries(list(params.logit_bias), bias)
        self._stops[row] = _entries(stop_ids, [-np.inf] * len(stop_ids))
        self._allowed[row] = self._bits(params.allowed_token_ids) if params.allowed_token_ids else None
        self._bad_words[row] = params.bad_word_ids
        self._time_rules = params.time_rules or self._time_rules  # a model has one vocabulary
        self._extras[row] = (
            _flags(params, bool(stop_ids)),
            params.presence_penalty,
            params.frequency_penalty,
            min(max(params.repetition_penalty, REPETITION_RANGE[0]), REPETITION_RANGE[1]),
            new_row.num_prompt_tokens,
            new_row.num_prompt_tokens + max(params.min_tokens, 1) if stop_ids else 0,
            -1 if params.logprobs is None else min(params.logprobs, self.vocab_size),
        )

    def select(self, rows: IntArray, positions: IntArray) -> SamplingMetadata:
        """Select the rows that sample in a step; one row may do so for several positions.

        Args:
            rows: [S] rows of the tables, in the order of the logits.
            positions: [S] index in its sequence of the token each samples, which is the number of tokens before it.
        """
        key = rows.astype(np.int64).tobytes()
        if self._last is None or self._last[0] != key:
            self._last = key, self._select(rows)
        known = self._last[1]
        metadata, draws = known.metadata, known.metadata.draws.copy()
        records = draws.view(RECORD)[:, 0]
        records["position"] = positions
        if known.keys is not None:
            records["uniform"], records["redraw"] = uniforms(known.keys, positions)
        penalties, words, marks = metadata.penalties, metadata.bad_words, metadata.time_marks
        return SamplingMetadata(
            draws,
            metadata.only_argmax,
            metadata.bias,
            penalties and msgspec.structs.replace(penalties, positions=_column(positions[penalties.indices], np.int64)),
            metadata.stops and _having(metadata.stops, positions < known.first_stops),
            metadata.allowed_tokens,
            words and msgspec.structs.replace(words, positions=_column(positions[words.indices], np.int64)),
            metadata.logprobs,
            marks and msgspec.structs.replace(marks, positions=_column(positions[marks.indices], np.int64)),
        )

    def _select(self, rows: IntArray) -> _Selection:
        draws, extras = self._draws.take(rows), self._extras.take(rows)
        is_random = bool(draws["kind"].any())
        keys = keys_of(self._seeds.take(rows)) if is_random else None
        flags = extras["flags"]
        at = {extra: np.flatnonzero(flags & extra) for extra in Extra}
        metadata = SamplingMetadata(
            pack(draws),
            only_argmax=not (is_random or flags.any()),
            bias=_joined(at[Extra.BIAS], rows, self._bias),
            penalties=_penalties(at[Extra.PENALTIES], rows, extras),
            stops=_joined(at[Extra.MIN_TOKENS], rows, self._stops),
            allowed_tokens=self._bitmask(at[Extra.ALLOWED_TOKENS], rows),
            bad_words=self._words(at[Extra.BAD_WORDS], rows),
            logprobs=_logprobs(at[Extra.LOGPROBS], extras["num_logprobs"]),
            time_marks=self._marks(at[Extra.TIME_MARKS], rows),
        )
        return _Selection(keys, extras["first_stop_position"], metadata)

    def _bitmask(self, indices: IntArray, rows: IntArray) -> TokenBitmask | None:
        if not len(indices):
            return None
        bits = [bits for row in rows[indices].tolist() if (bits := self._allowed[row]) is not None]
        return TokenBitmask(_column(indices, np.int64), np.stack(bits))

    def _words(self, indices: IntArray, rows: IntArray) -> BadWords | None:
        words = [(index, word) for index in indices.tolist() for word in self._bad_words[rows[index]]]
        if not words:
            return None
        longest = max(len(word) for _, word in words) - 1
        heads = np.full((len(words), longest), PADDING, dtype=np.int64)
        for number, (_, word) in enumerate(words):
            heads[number, longest - len(word) + 1 :] = word[:-1]
        owners = np.array([index for index, _ in words])
        return BadWords(
            indices=_column(owners, np.int64),
            rows=_column(rows[owners], np.int64),
            positions=np.zeros(len(owners), dtype=np.int64),
            num_prompt_tokens=_column(self._extras["num_prompt_tokens"][rows[owners]], np.int64),
            heads=heads,
            last=np.array([word[-1] for _, word in words], dtype=np.int64),
        )

    def _marks(self, indices: IntArray, rows: IntArray) -> TimeMarks | None:
        if self._time_rules is None or not len(indices):
            return None
        own = rows[indices]
        prompts = self._extras["num_prompt_tokens"][own]
        places = _column(indices, np.int64), _column(own, np.int64), _column(prompts, np.int64)
        return TimeMarks(self._time_rules, *places, np.zeros(len(indices), np.int64))

    def _bits(self, token_ids: tuple[int, ...]) -> npt.NDArray[np.int32]:
        flags = np.zeros(-(-self.vocab_size // WORD_BITS) * WORD_BITS, dtype=np.uint8)
        flags[list(token_ids)] = 1
        return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


def _flags(params: SamplingParams, waits_for_stop: bool) -> int:
    wanted = (
        (Extra.BIAS, params.logit_bias),
        (Extra.PENALTIES, params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0),
        (Extra.MIN_TOKENS, waits_for_stop),
        (Extra.ALLOWED_TOKENS, params.allowed_token_ids),
        (Extra.BAD_WORDS, params.bad_word_ids),
        (Extra.LOGPROBS, params.logprobs is not None),
        (Extra.TIME_MARKS, params.time_rules is not None),
    )
    return sum(int(extra) for extra, is_wanted in wanted if is_wanted)


def _entries(token_ids: Sequence[int], values: Sequence[float]) -> Entries:
    if not token_ids:
        return _NO_ENTRIES
    return np.array(token_ids, dtype=np.int64), np.array(values, dtype=np.float32)


def _joined(indices: IntArray, rows: IntArray, table: Sequence[Entries]) -> LogitEntries | None:
    """Join the entries of these rows; None if there are no rows."""
    if not len(indices):
        return None
    token_ids, values = zip(*(table[row] for row in rows[indices].tolist()), strict=True)
    owners = np.repeat(indices, [len(ids) for ids in token_ids])
    return LogitEntries(_column(owners, np.int64), np.concatenate(token_ids), np.concatenate(values))


def _having(entries: LogitEntries, rows: npt.NDArray[np.bool_]) -> LogitEntries | None:
    """Return the entries of those rows of the logits for which `rows` [S] is True; None if there are none."""
    is_kept = rows[entries.indices]
    if is_kept.all():
        return entries
    parts = (entries.indices[is_kept], entries.token_ids[is_kept], entries.values[is_kept])
    return LogitEntries(*parts) if len(parts[0]) else None


def _penalties(indices: IntArray, rows: IntArray, extras: npt.NDArray[np.void]) -> Penalties | None:
    if not len(indices):
        return None
    own = extras.take(indices)
    return Penalties(
        indices=_column(indices, np.int64),
        rows=_column(rows[indices], np.int64),
        num_prompt_tokens=_column(own["num_prompt_tokens"], np.int64),
        positions=np.zeros(len(indices), dtype=np.int64),
        presence=_column(own["presence"], np.float32),
        frequency=_column(own["frequency"], np.float32),
        repetition=_column(own["repetition"], np.float32),
    )


def _logprobs(indices: IntArray, counts: IntArray) -> LogprobGroup | None:
    return LogprobGroup(_column(indices, np.int64), tuple(counts[indices].tolist())) if len(indices) else None


def _column(values: npt.NDArray[np.generic], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values, dtype=dtype)
