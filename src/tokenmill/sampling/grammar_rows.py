"""Which tokens the grammar of each row allows next, computed beside the steps.

    set(row) ─> replay its output, fill its mask ─┐ (threads; llguidance gives up the interpreter lock)
    launch ─> forward ─> `ready` ─> sample ─> `take` the tokens ─> fill the next masks ...

A mask is begun as soon as the token before it is known, so it is there when the next step wants it. Beside a model on
the CPU those that are filled fast are filled at once instead. One that is late does not hold up the batch: its row goes
without a token in that step, and the scheduler runs it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.sampling.allowed import WORD_BITS, AllowedTokens
from tokenmill.sampling.row_grammar import IntArray, MaskThreads, RowGrammar
from tokenmill.scheduler.plan import NewRow

# How long a step waits for masks after its forward pass, in seconds.
PATIENCE = 0.01


class GrammarStep:
    """The rows of one step that have a grammar, by their index among the rows that sample."""

    def __init__(self, rows: Sequence[tuple[int, RowGrammar]], late: Sequence[int], threads: MaskThreads) -> None:
        """`late`: rows that are steps ahead of their grammar, since it had no mask in time in a step before."""
        self._rows = rows
        self._late = late
        self._threads = threads
        self._ready: Sequence[tuple[int, RowGrammar]] = []
        self._is_on_cpu = False

    def ready(self, device: torch.device) -> AllowedTokens | None:
        """The masks that are there now, or `PATIENCE` later; None if none is."""
        self._is_on_cpu = device.type == "cpu"
        # Many rows share a job, and to ask one takes a lock.
        jobs = {row.job for _, row in self._rows}
        done = {job for job in jobs if job.done()}
        if len(done) < len(jobs):
            done = wait(jobs, PATIENCE).done
        self._ready = self._rows if len(done) == len(jobs) else [one for one in self._rows if one[1].job in done]
        usable = [(index, row.mask) for index, row in self._ready if not row.failure]
        if not usable:
            return None
        indices = np.array([index for index, _ in usable], dtype=np.int64)
        first = usable[0][1]
        bits = first if len(usable) == 1 else np.concatenate([mask for _, mask in usable])
        return AllowedTokens(
            torch.from_numpy(indices).to(device), torch.from_numpy(bits.reshape(len(usable), -1)).to(device)
        )

    def take(self, token_ids: IntArray) -> dict[int, str]:
        """Take in what was sampled and begin the next masks.

        Args:
            token_ids: [S] int32; set to -1 where a row goes without a token.

        Returns:
            Why a row cannot go on, by its index.
        """
        failures = {index: row.failure for index, row in self._ready if row.failure}
        sampled = [one for one in self._ready if one[0] not in failures] if failures else self._ready
        tokens = token_ids.tolist()
        for index, row in sampled:
            row.take(tokens[index])
        if self._late or len(sampled) < len(self._rows):
            without = {*self._late, *(index for index, _ in self._rows)} - {index for index, _ in sampled}
            token_ids[list(without)] = -1
        rows = [row for _, row in sampled]
        if len(tokens) == 1:
            # Nobody else would have to wait, so it is not worth waking a thread.
            self._threads.advance(rows)
        elif self._is_on_cpu:
            # The model takes all cores: a thread would get no time of its own, and handing it the work takes longer.
            slow = [row for row in rows if row.is_slow]
            self._threads.begin(slow)
            self._threads.advance([row for row in rows if not row.is_slow] if slow else rows)
        else:
            self._threads.begin(rows)
        return failures


class GrammarRows:
    """The grammars of all rows.

    Args:
        template: gives the compiled grammar of a text.
    """

    def __init__(self, template: Callable[[str], Any | None], vocab_size: int) -> None:
        self._template = template
        self._num_words = -(-vocab_size // WORD_BITS)
        self._rows: dict[int, RowGrammar] = {}
        self._threads = MaskThreads()

    def set(self, new_rows: Iterable[NewRow]) -> None:
        """These requests have taken their rows; nothing is left of who had them before."""
        begun = []
        for new in new_rows:
            self._rows.pop(new.row, None)
            if new.params.grammar is not None:
                row = RowGrammar(self._template(new.params.grammar.text), new, self._num_words)
                self._rows[new.row] = row
                begun.append(row)
        self._threads.begin(begun)

    def step(self, rows: npt.NDArray[np.integer], positions: npt.NDArray[np.integer]) -> GrammarStep | None:
        """The grammars among the rows that sample in a step; None if there are none.

        Args:
            rows, positions: [S] int32; the row of each, and the index in its sequence of the token it samples.
        """
        if not self._rows:
            return None
        due, late = [], []
        for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            grammar = self._rows.get(row)
            if grammar is not None and grammar.position == position:
                due.append((index, grammar))
            elif grammar is not None:
                late.append(index)
        return GrammarStep(due, late, self._threads) if due or late else None

    def concerns(self, rows: npt.NDArray[np.integer]) -> bool:
        """Whether any of these rows has a grammar."""
        return bool(self._rows) and any(row in self._rows for row in rows.tolist())

    def close(self) -> None:
        """End the threads."""
        self._threads.close()
