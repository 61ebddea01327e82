"""Report on prompts for requests that ask: log probabilities of the prompt's tokens, or one vector that stands for it.

Collected while the prompt is computed, chunk by chunk; a row that is computed anew (after a preemption) begins anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import AdmittedRequest, RowFailure, StepPlan, TokenLogprobs
from tokenmill.engine.runner.row_tables import RowTables
from tokenmill.engine.runner.samples import Samples
from tokenmill.engine.runner.transport import Transport
from tokenmill.model.attention.row_extension import Arrays, RowExtension
from tokenmill.model.pooling.rows import PooledRows
from tokenmill.model.sampling.logprobs import LogprobArrays, LogprobGroup, take_logprobs, to_messages
from tokenmill.platform.host_arrays import library_of

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import Array

# Logits of so many values are held at a time: 64 MiB.
_LOGITS_AT_ONCE = 1 << 24

IntArray = npt.NDArray[np.int64]


class _Row(msgspec.Struct, frozen=True):
    """A row's report settings; `num_logprobs` None: only its vector is wanted."""

    num_prompt_tokens: int
    num_logprobs: int | None


class OutputTokens(msgspec.Struct, frozen=True):
    """The tokens of a step that the model gives an output for, in order.

    Attributes:
        indices: [N] int64, tokens of the step.
        samples: [S] int64, the outputs from which rows sample.
        spans: batch index -> the first output that a report on its prompt reads, and the end of these.
    """

    indices: IntArray
    samples: IntArray
    spans: dict[int, tuple[int, int]]


class Reports(msgspec.Struct, frozen=True):
    """Reports that a step brought, by batch index.

    Attributes:
        logprobs: of the prompt's tokens from position `num_computed + 1` on, in pieces.
        embeddings: a vector or scores, float32, little-endian; of prompts that are complete.
        failures: rows for which the model gave no finite numbers.
    """

    logprobs: dict[int, list[LogprobArrays]] = msgspec.field(default_factory=dict)
    embeddings: dict[int, bytes] = msgspec.field(default_factory=dict)
    failures: dict[int, RowFailure] = msgspec.field(default_factory=dict)

    def on_host(self, transport: Transport) -> Reports:
        """Begin to copy log probabilities to the host, and return them as there."""
        numbers = [array for own in self.logprobs.values() for piece in own for array in piece.numbers]
        if not numbers:
            return self
        found = iter(transport.fetch(*numbers))
        copied = {
            index: [piece.with_numbers([next(found) for _ in piece.numbers]) for piece in own]
            for index, own in self.logprobs.items()
        }
        return msgspec.structs.replace(self, logprobs=copied)

    def told_logprobs(self) -> tuple[dict[int, list[TokenLogprobs]], dict[int, RowFailure]]:
        """Return the log probabilities, once they are on the host, and the rows that have no finite ones instead."""
        told, failures = dict[int, list[TokenLogprobs]](), dict[int, RowFailure]()
        for index, pieces in self.logprobs.items():
            own = [one for piece in pieces for one in to_messages(piece).values()]
            if any(math.isnan(one.sampled.logprob) for one in own):
                failures[index] = RowFailure("the model's logits for this prompt are NaN or infinite")
            else:
                told[index] = own
        return told, failures


class PromptReports(RowExtension):
    """The report settings of every row. Always written whole, so that a reused row keeps nothing of its last owner.

    Attributes:
        pooled: the rows that make vectors or scores.
        watch: sees the logits behind log probabilities, [n, vocab_size] float32, in the order of positions; None: they
            are dropped.

    Args:
        native: kernels that take log probabilities; None: torch does.
    """

    def __init__(self, max_rows: int, vocab_size: int, native: _native.Kernels | None = None) -> None:
        self._rows: list[_Row | None] = [None] * max_rows
        # Where the prompt of a row that reports on it ends; 0: the row does not.
        self._ends = np.zeros(max_rows, dtype=np.int64)
        self.pooled = PooledRows(max_rows)
        self.watch: Callable[[npt.NDArray[np.float32]], None] | None = None
        self._native = native
        self._rows_at_once = max(1, _LOGITS_AT_ONCE // vocab_size)

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in the report settings of new rows."""
        for new_row in plan.new_rows:
            self._set(new_row)
        return {}

    def _set(self, new_row: AdmittedRequest) -> None:
        """Set the report settings of `new_row.row` from its new request."""
        num_logprobs = new_row.params.prompt_logprobs
        is_reported = num_logprobs is not None or new_row.pooling is not None
        self._rows[new_row.row] = _Row(new_row.num_prompt_tokens, num_logprobs) if is_reported else None
        self.pooled.set(new_row)
        self._ends[new_row.row] = new_row.num_prompt_tokens if is_reported else 0

    def outputs_of(self, plan: StepPlan, samples: Samples) -> OutputTokens:
        """Return the tokens that are sampled from, and those that reports on prompts read."""
        reporting = np.flatnonzero(plan.num_computed < self._ends[plan.rows]).tolist()
        if not reporting:
            return OutputTokens(samples.outputs, np.arange(len(samples)), {})
        starts = samples.query_starts
        wanted = np.zeros(starts[-1], dtype=np.bool_)
        wanted[samples.outputs] = True
        read = [self._reads(plan, index, int(starts[index])) for index in reporting]
        for first, end in read:
            wanted[first:end] = True
        indices = np.flatnonzero(wanted)
        spans = dict(zip(reporting, map(tuple, np.searchsorted(indices, read).tolist()), strict=True))
        return OutputTokens(indices, np.searchsorted(indices, samples.outputs), spans)

    def _reads(self, plan: StepPlan, index: int, start: int) -> tuple[int, int]:
        """Return the tokens of a step that a report reads, as first and end; `start`: the request's first."""
        row, count = int(plan.rows[index]), int(plan.num_scheduled[index])
        settings = self._rows[row]
        pooled = self.pooled.reads(row, int(plan.num_computed[index]), count)
        if pooled is None or (settings is not None and settings.num_logprobs is not None):
            return start, start + count
        return start + pooled[0], start + pooled[1]

    def report_prompts(
        self,
        plan: StepPlan,
        spans: dict[int, tuple[int, int]],
        outputs: Array,
        tables: RowTables,
        logits_of: Callable[[int], Callable[[Array], Array]],
    ) -> Reports:
        """Report on the prompts of a step.

        Args:
            spans: see `OutputTokens`.
            outputs: [N, hidden_size], the model's outputs for the output tokens.
            logits_of: row -> function from its outputs to logits [., V] of any float dtype.
        """
        reports = Reports()
        for index, (first, end) in spans.items():
            row, number = self._rows[plan.rows[index]], int(plan.rows[index])
            assert row is not None, "a row that reports has settings"
            start = int(plan.num_computed[index])
            if row.num_logprobs is not None:
                own = outputs[first : min(end, first + row.num_prompt_tokens - start)]
                # The output of a token tells of the next one; of the prompt's last one nothing is told here.
                targets = tables.tokens[number, start + 1 : start + 1 + len(own)][: row.num_prompt_tokens - 1 - start]
                reports.logprobs[index] = list(self._logprobs(own, targets, row.num_logprobs, logits_of(number)))
        vectors, failures = self.pooled.pool(plan, spans, outputs)
        reports.embeddings.update(vectors)
        reports.failures.update(failures)
        return reports

    def _logprobs(
        self, outputs: Array, targets: Array, count: int, logits: Callable[[Array], Array]
    ) -> Iterator[LogprobArrays]:
        size = self._rows_at_once
        for start in range(0, len(targets), size):
            ids = targets[start : start + size]
            group = LogprobGroup(np.arange(len(ids), dtype=np.int64), (count,) * len(ids))
            values = logits(outputs[start : start + len(ids)])
            xp = library_of(values)
            values = xp.astype(values, "float32")
            if self.watch is not None:
                self.watch(_on_host(values))
            yield take_logprobs(values, xp.astype(ids, "int64"), group, self._native)


def _on_host(array: Array) -> npt.NDArray[Any]:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()
