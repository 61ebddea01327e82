"""`PooledRows`: pool the states of rows' prompts, chunk by chunk, in float64, on the device that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.core.plan import AdmittedRequest, RowFailure, StepPlan
from tokenmill.core.pooling import PoolingParams, PoolMode
from tokenmill.model.pooling.chain import PoolingChain, Vectors

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array

_ENDS = frozenset({PoolMode.CLS, PoolMode.LAST})


@dataclass(slots=True)
class _Row:
    """A row's prompt, and what is pooled of it so far: [size] float64 of each mode."""

    params: PoolingParams
    num_prompt_tokens: int
    so_far: dict[PoolMode, Vectors] = field(default_factory=dict)

    def take(self, values: Array, position: int) -> None:
        """Take in the outputs of consecutive tokens, the first of which stands at `position` of the prompt."""
        end, modes = position + len(values), self.params.modes
        if PoolMode.CLS in modes and position == 0:
            self.so_far[PoolMode.CLS] = _widened(values[:1])[0]
        if PoolMode.LAST in modes and end == self.num_prompt_tokens:
            self.so_far[PoolMode.LAST] = _widened(values[-1:])[0]
        position, values = max(position, self.params.first), values[max(0, self.params.first - position) :]
        if len(values) == 0 or _ENDS.issuperset(modes):
            return
        wide = _widened(values)
        for mode in modes:
            if mode in _ENDS:
                continue
            if mode is PoolMode.MAX:
                own = wide.max(0) if isinstance(wide, np.ndarray) else wide.amax(0)
            elif mode is PoolMode.WEIGHTED:
                own = (wide * _weights(position, wide)).sum(0)
            else:
                own = wide.sum(0)
            before = self.so_far.get(mode)
            self.so_far[mode] = own if before is None else _joined(mode, before, own)

    def pooled(self) -> Vectors:
        """Return the vector of the whole prompt, [size x modes] float64, on the host."""
        first, end = self.params.first, self.num_prompt_tokens
        count = end - first
        divisors = {
            PoolMode.MEAN: count,
            PoolMode.SQRT: count**0.5,
            PoolMode.WEIGHTED: (first + 1 + end) * count / 2,
        }
        modes = self.params.modes
        means = _on_host([self.so_far[mode] for mode in modes])
        return np.concatenate([own / divisors.get(mode, 1) for own, mode in zip(means, modes, strict=True)])


class PooledRows:
    """The pooling of every row. Always set whole, so that a reused row keeps nothing of its last owner.

    Attributes:
        chain: what follows the pooled states.
    """

    def __init__(self, max_rows: int) -> None:
        self._rows: list[_Row | None] = [None] * max_rows
        self.chain = PoolingChain()

    def set(self, new_row: AdmittedRequest) -> None:
        """Set the pooling of `new_row.row` from its new request."""
        params = new_row.pooling
        self._rows[new_row.row] = None if params is None else _Row(params, new_row.num_prompt_tokens)

    def reads(self, row: int, start: int, count: int) -> tuple[int, int] | None:
        """Return begin and end of those of a step's tokens of a row whose outputs are pooled; None: it pools nothing.

        Args:
            start: position of the step's first token. count: its tokens.
        """
        pooled = self._rows[row]
        if pooled is None:
            return None
        end = min(count, pooled.num_prompt_tokens - start)
        if pooled.params.modes == (PoolMode.LAST,):
            return (end - 1, end) if start + end == pooled.num_prompt_tokens else (0, 0)
        if pooled.params.modes == (PoolMode.CLS,):
            return (0, 1) if start == 0 else (0, 0)
        return 0, end

    def pool(
        self, plan: StepPlan, spans: Mapping[int, tuple[int, int]], outputs: Array
    ) -> tuple[dict[int, bytes], dict[int, RowFailure]]:
        """Pool a step's outputs; return the vectors of prompts that are complete, and failures, by batch index.

        Args:
            spans: batch index -> the first output of the tokens that `reads` names, and their end.
            outputs: [N, hidden_size], the model's outputs.
        """
        complete: list[tuple[int, _Row]] = []
        for index, (first, end) in spans.items():
            number, start = int(plan.rows[index]), int(plan.num_computed[index])
            row = self._rows[number]
            if row is None:
                continue
            read = self.reads(number, start, int(plan.num_scheduled[index]))
            assert read is not None, "the row pools"
            # Of a row whose log probabilities are told, too, all outputs are there.
            skipped = read[0] if end - first > read[1] - read[0] else 0
            row.take(outputs[first + skipped : first + skipped + read[1] - read[0]], start + read[0])
            if start + plan.num_scheduled[index] >= row.num_prompt_tokens:
                complete.append((index, row))
        return self._finished(complete)

    def _finished(self, complete: list[tuple[int, _Row]]) -> tuple[dict[int, bytes], dict[int, RowFailure]]:
        vectors: dict[int, bytes] = {}
        failures: dict[int, RowFailure] = {}
        # Rows of other modes have vectors of other sizes.
        by_size: dict[int, list[tuple[int, _Row, Vectors]]] = {}
        for index, row in complete:
            pooled = row.pooled()
            by_size.setdefault(len(pooled), []).append((index, row, pooled))
        for rows in by_size.values():
            found = self.chain.run(np.stack([pooled for _, _, pooled in rows]), [row.params for _, row, _ in rows])
            for (index, _, _), vector in zip(rows, found, strict=True):
                if np.isfinite(vector).all():
                    vectors[index] = vector.astype("<f4").tobytes()
                else:
                    failures[index] = RowFailure("the model's vector for this prompt is NaN or infinite")
        return vectors, failures


def _joined(mode: PoolMode, before: Any, own: Any) -> Any:
    if mode is not PoolMode.MAX:
        return before + own
    return np.maximum(before, own) if isinstance(own, np.ndarray) else before.maximum(own)


def _weights(position: int, wide: Any) -> Any:
    """Return the weights [n, 1] of consecutive tokens, of the type of their states."""
    if isinstance(wide, np.ndarray):
        return np.arange(position + 1, position + 1 + len(wide), dtype=np.float64)[:, None]
    return wide.new_ones(len(wide), 1).cumsum(0) + position


def _widened(outputs: Array) -> Any:
    """Return float64 numbers. The host has those of bfloat16 as bits, in uint16."""
    if not isinstance(outputs, np.ndarray):
        return outputs.double()
    if outputs.dtype == np.uint16:
        outputs = (outputs.astype(np.uint32) << 16).view(np.float32)
    return outputs.astype(np.float64)


def _on_host(vectors: Sequence[Any]) -> Any:
    """Return vectors of one size on the host; those of a device come over in one copy."""
    if isinstance(vectors[0], np.ndarray):
        return vectors
    joined = vectors[0].new_empty(len(vectors), len(vectors[0]))
    for place, vector in zip(joined, vectors, strict=True):
        place.copy_(vector)
    return joined.cpu().numpy()
