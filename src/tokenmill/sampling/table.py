"""`SamplingTable`: the sampling parameters of every row, and the selection of those that a step needs.

One record per row, always written whole, so that a reused row keeps nothing of its former owner. The same rows sample
in step after step, so what does not change from one to the next is selected once. Knows the vocabulary's size and the
device, not the logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.sampling.batch import DrawGroup, LogitEntries, LogprobGroup, PenaltyGroup, SamplingBatch
from tokenmill.sampling.candidates import MAX_CANDIDATES
from tokenmill.sampling.random import uniforms
from tokenmill.sampling.token_rules import TokenRuleTable
from tokenmill.scheduler.plan import NewRow

MAX_LOGIT_BIAS = 100.0
# Below this the quotient of two logits' difference and the temperature overflows float32; no logits are that close.
MIN_TEMPERATURE = 1e-6
# A factor outside of this range is 0 or infinite in float32, or makes logits so.
REPETITION_RANGE = (1e-30, 1e30)

Record = npt.NDArray[np.void]
Indices = npt.NDArray[np.intp]
# Token ids and the value for each of them.
Entries = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


class Draw(IntEnum):
    """How a row comes to its token; the groups of `SamplingBatch`."""

    GREEDY = 0
    PLAIN = 1
    FILTERED = 2
    WIDE = 3


_RECORD = np.dtype(
    [
        ("draw", np.uint8),
        ("has_extra", np.bool_),
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("has_penalty", np.bool_),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("seed", np.uint64),
        ("num_prompt_tokens", np.int64),
        ("first_stop_position", np.int64),
        ("num_logprobs", np.int64),
        ("has_bias", np.bool_),
        ("has_rules", np.bool_),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class RowDraws:
    """How S rows come to their tokens: [S] each, int64 and float64, on the host.

    Attributes:
        kind: a `Draw`.
        top_k: the size of the vocabulary where it is off.
    """

    kind: npt.NDArray[np.int64]
    top_k: npt.NDArray[np.int64]
    temperature: npt.NDArray[np.float64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    uniform: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What `batch` knows of some rows without their positions.

    Attributes:
        always: a batch with all that does not depend on positions; the numbers of its groups are missing.
        groups: of `always`, by name, with the indices of their rows on the host.
        waits_for_stop: some row has stop ids that are banned at first.
    """

    records: Record
    always: SamplingBatch
    groups: dict[str, tuple[Indices, DrawGroup]]
    has_penalty: bool
    has_rules: bool
    waits_for_stop: bool


class SamplingTable:
    """Sampling parameters of up to `max_rows` rows for a vocabulary of `vocab_size` tokens.

    Args:
        device: where the tensors of a `SamplingBatch` are placed.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self._records: Record = np.zeros(max_rows, dtype=_RECORD)
        self._bias: list[Entries | None] = [None] * max_rows
        self._banned: list[Entries | None] = [None] * max_rows
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._rules = TokenRuleTable(max_rows, vocab_size, self._device)
        self._last: tuple[bytes, _Chosen] | None = None

    def set(self, new_row: NewRow) -> None:
        """Make `new_row.row` the row of this request; every field is overwritten."""
        params, row = new_row.params, new_row.row
        self._last = None
        # A grammar's own mask keeps stop ids out: it knows where nothing else is allowed.
        stop_ids = new_row.stop_token_ids if params.min_tokens and params.grammar is None else ()
        self._bias[row] = _entries(
            tuple(params.logit_bias),
            [min(max(value, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS) for value in params.logit_bias.values()],
        )
        self._banned[row] = _entries(stop_ids, [-np.inf] * len(stop_ids))
        has_penalty = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        draw = self._draw(new_row, top_k)
        has_rules = self._rules.set(new_row)
        has_extra = bool(
            draw is not Draw.GREEDY
            or has_penalty
            or params.logit_bias
            or stop_ids
            or params.logprobs is not None
            or has_rules
        )
        self._records[row] = (
            draw,
            has_extra,
            max(params.temperature, MIN_TEMPERATURE),
            top_k,
            params.top_p,
            params.min_p,
            has_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            min(max(params.repetition_penalty, REPETITION_RANGE[0]), REPETITION_RANGE[1]),
            new_row.seed & (2**64 - 1),
            new_row.num_prompt_tokens,
            new_row.num_prompt_tokens + params.min_tokens if stop_ids else 0,
            -1 if params.logprobs is None else min(params.logprobs, self.vocab_size),
            bool(params.logit_bias),
            has_rules,
        )

    def batch(
        self, rows: npt.NDArray[np.integer], positions: npt.NDArray[np.integer], stream: int = 0
    ) -> SamplingBatch:
        """Select the rows that sample in a step.

        Args:
            rows: [S] rows of the table, in the order of the logits.
            positions: [S] index in its sequence of the token each row samples, which is the number of tokens before it.
            stream: tells apart several draws of a row for one position.
        """
        chosen = self._choose(rows) if stream else self._choose_again(rows)
        if chosen.always.only_argmax:
            return chosen.always
        records, changing = chosen.records, dict[str, Any]()
        if chosen.groups:
            numbers = uniforms(records["seed"], positions, stream)
            for name, (indices, group) in chosen.groups.items():
                changing[name] = dataclasses.replace(group, uniform=self._to_device(numbers[indices]))
        if chosen.has_penalty:
            changing["penalties"] = self._penalty_group(rows, records, positions)
        if chosen.waits_for_stop:
            is_early = _where(positions < records["first_stop_position"])
            changing["banned"] = self._logit_entries(is_early, rows, self._banned)
        if chosen.has_rules:
            changing["rules"] = self._rules.select(rows, positions)
        return dataclasses.replace(chosen.always, **changing) if changing else chosen.always

    def draws(self, rows: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> RowDraws:
        """How the rows that sample in a step come to their tokens, on the host; see `batch`."""
        records = self._records[rows]
        return RowDraws(
            kind=records["draw"].astype(np.int64),
            top_k=records["top_k"],
            temperature=records["temperature"],
            top_p=records["top_p"],
            min_p=records["min_p"],
            uniform=uniforms(records["seed"], positions),
        )

    def needs_processing(self, rows: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> bool:
        """Whether any of these rows asks for more than its draw: other logits, or log probabilities."""
        records = self._records[rows]
        more = records["has_penalty"] | records["has_bias"] | records["has_rules"] | (records["num_logprobs"] >= 0)
        return bool((more | (positions < records["first_stop_position"])).any())

    def _draw(self, new_row: NewRow, top_k: int) -> Draw:
        params = new_row.params
        if params.is_greedy:
            return Draw.GREEDY
        if MAX_CANDIDATES < top_k < self.vocab_size:
            return Draw.WIDE
        is_plain = top_k == self.vocab_size and params.top_p >= 1.0 and params.min_p <= 0.0
        return Draw.PLAIN if is_plain else Draw.FILTERED

    def _choose_again(self, rows: npt.NDArray[np.integer]) -> _Chosen:
        """What is known of these rows, kept until other rows sample or one of them changes hands."""
        key = rows.astype(np.int64).tobytes()
        if self._last is None or self._last[0] != key:
            self._last = key, self._choose(rows)
        return self._last[1]

    def _choose(self, rows: npt.NDArray[np.integer]) -> _Chosen:
        """What is known of these rows."""
        records = self._records[rows]
        groups = {
            name: (indices, self._draw_group(records[indices], indices))
            for name, draw in (("plain", Draw.PLAIN), ("filtered", Draw.FILTERED), ("wide", Draw.WIDE))
            if len(indices := _where(records["draw"] == draw))
        }
        greedy = _where(records["draw"] == Draw.GREEDY)
        filtered = records["top_k"][records["draw"] == Draw.FILTERED]
        always = SamplingBatch(
            size=len(rows),
            only_argmax=not records["has_extra"].any(),
            greedy=self._to_device(greedy) if len(greedy) else None,
            filtered_within_candidates=bool((filtered <= MAX_CANDIDATES).all()),
            bias=self._logit_entries(_where(records["has_bias"]), rows, self._bias),
            logprobs=self._logprob_group(records),
        )
        has_penalty, has_rules = bool(records["has_penalty"].any()), bool(records["has_rules"].any())
        waits = bool(records["first_stop_position"].any())
        return _Chosen(records, always, groups, has_penalty, has_rules, waits)

    def _draw_group(self, chosen: Record, indices: Indices) -> DrawGroup:
        return DrawGroup(
            indices=self._to_device(indices),
            temperature=self._to_device(chosen["temperature"]),
            top_k=self._to_device(chosen["top_k"]),
            top_p=self._to_device(chosen["top_p"]),
            min_p=self._to_device(chosen["min_p"]),
            uniform=torch.empty(0),
        )

    def _penalty_group(
        self, rows: npt.NDArray[np.integer], records: Record, positions: npt.NDArray[np.integer]
    ) -> PenaltyGroup | None:
        indices = _where(records["has_penalty"])
        if not len(indices):
            return None
        chosen = records[indices]
        return PenaltyGroup(
            indices=self._to_device(indices),
            table_rows=self._to_device(rows[indices].astype(np.int64)),
            num_prompt_tokens=self._to_device(chosen["num_prompt_tokens"]),
            positions=self._to_device(positions[indices].astype(np.int64)),
            presence=self._to_device(chosen["presence"]),
            frequency=self._to_device(chosen["frequency"]),
            repetition=self._to_device(chosen["repetition"]),
            length=int(positions[indices].max()),
        )

    def _logit_entries(
        self, indices: Indices, rows: npt.NDArray[np.integer], table: list[Entries | None]
    ) -> LogitEntries | None:
        pairs = [(index, entries) for index in indices.tolist() if (entries := table[rows[index]]) is not None]
        if not pairs:
            return None
        return LogitEntries(
            indices=self._to_device(np.repeat([index for index, _ in pairs], [len(ids) for _, (ids, _) in pairs])),
            token_ids=self._to_device(np.concatenate([ids for _, (ids, _) in pairs])),
            values=self._to_device(np.concatenate([values for _, (_, values) in pairs])),
        )

    def _logprob_group(self, records: Record) -> LogprobGroup | None:
        indices = _where(records["num_logprobs"] >= 0)
        if not len(indices):
            return None
        return LogprobGroup(self._to_device(indices), tuple(records["num_logprobs"][indices].tolist()))

    def _to_device(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device, non_blocking=True)


def _entries(token_ids: Sequence[int], values: Sequence[float]) -> Entries | None:
    if not token_ids:
        return None
    return np.asarray(token_ids, dtype=np.int64), np.asarray(values, dtype=np.float32)


def _where(mask: npt.NDArray[np.bool_]) -> Indices:
    return np.flatnonzero(mask)
