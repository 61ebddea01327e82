"""The tokens that the grammar of each row allows next, and the one rule by which a row draws under them.

The rule, which depends on a row's parameters alone:

    greedy                  the largest of what the mask leaves
    top-k, top-p or min-p   one draw from what the mask leaves, for the filters would see other logits without it
    any other               an optimistic draw from the whole vocabulary with the first number of its key; if the mask
                            rejects that token, a redraw from what the mask leaves with the second

The last has the chances of one draw under the mask: p(t) + p(rejected) p(t) / p(allowed) = p(t) / p(allowed). It lets a
row do without its mask: whether the mask is there by then, is filled only now, or is never filled since the matcher has
said that the mask would have the token, the token is the same. A greedy row may go the same way.

Masks are filled beside the steps, each begun as soon as the token before it is known:

    set(row) ─> replay its output, fill its mask ─┐ (threads; llguidance gives up the interpreter lock)
    launch ─> forward ─> `ready` ─> sample ─> `take_samples` ─> fill the next masks ...

One that is late does not hold up the batch: its row goes without a token in that step, and the scheduler runs it again.

Where the host itself runs the model, masks cannot be filled beside it, and asking a matcher about one token is several
times cheaper than a mask. So rows that may do without a mask get one only if their token is rejected (as in llama.cpp),
except those that have just resumed or whose grammar has become slow:

    launch ─> forward ─> sample ─> `deciding` ─> redraw these rows ─> `take_samples` ...

A row with drafts draws by the same rule at each of its positions, from the state behind the drafts before it. Its masks
there are filled from `step` on, beside the forward pass; rows without masks offer one token after the other up to the
first that is no draft, and have masks from one that is rejected on. A step may always bring fewer tokens: the next one
draws them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import AdmittedRequest, StepPlan
from tokenmill.model.attention.row_extension import Arrays, RowExtension
from tokenmill.model.sampling.bitmask import TokenBitmask
from tokenmill.model.sampling.row_grammar import SLOW_SECONDS, IntArray, MaskThreads, RowGrammar
from tokenmill.model.structured.cache import NO_CONSTRAINT
from tokenmill.platform.host_arrays import library_of

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array, ArrayLibrary

# How long a step waits for masks after its forward pass, in seconds.
PATIENCE = 0.01


class RowSamples:
    """The samples of one row in a step: its next token, and one behind each draft, as in `Samples`.

    Attributes:
        index: of its first sample among those of the step. count: number of its samples.
        drafts: its first drafts, behind which a token may be due.
        num_taken: number of its samples taken in so far.
    """

    def __init__(self, row: RowGrammar, index: int, drafts: list[int]) -> None:
        self.row = row
        self.index = index
        self.count = 1 + len(drafts)
        self.drafts = row.before_stop(drafts) if drafts else drafts  # behind its end a request samples nothing
        self.num_taken = 0

    @property
    def masks(self) -> tuple[int, IntArray]:
        """Index of the first sample not taken in, and the filled masks from there on; empty if the row has failed."""
        count = 0 if self.row.failure else 1 + len(self.drafts) - self.num_taken
        return self.index + self.num_taken, self.row.masks[:count]

    def trim(self) -> None:
        """Drop drafts behind which no mask is filled."""
        self.drafts = self.drafts[: self.num_taken + len(self.row.masks) - 1]

    def refused(self, tokens: Sequence[int]) -> list[tuple[int, IntArray]]:
        """Return the samples that may be due and that the row's masks refuse, with their masks."""
        found = []
        first, masks = self.masks
        for number in range(len(masks)):
            token_id = tokens[first + number]
            if token_id < 0:
                break
            if not self.row.allows(token_id, number):
                found.append((first + number, masks[number : number + 1]))
            elif self.drafts[self.num_taken + number :][:1] != [token_id]:
                break
        return found

    def take_samples(self, tokens: Sequence[int], take: Callable[[int], bool]) -> bool:
        """Let the row `take` what the step has sampled, as long as it is due. Return False if `take` does."""
        for number in range(self.num_taken, 1 + len(self.drafts)):
            token_id = tokens[self.index + number]
            if token_id < 0:
                break
            if not take(token_id):
                return False
            self.num_taken += 1
            if self.drafts[number : number + 1] != [token_id]:
                break
        return True


class GrammarStep:
    """The rows of one step that have a grammar, and where they sample.

    Attributes:
        proposals: after `take_samples`: tokens that grammars force to follow, by the index of the row's first sample.
    """

    def __init__(
        self, rows: Sequence[RowSamples], late: Sequence[int], threads: MaskThreads, on_host: bool, proposes: bool
    ) -> None:
        """Keep the rows, and begin masks behind their drafts. `late`: samples of rows that are ahead of their grammar,
        since it had no mask in time in a step before."""
        self.proposals: dict[int, list[int]] = {}
        self._masked = [one for one in rows if one.row.has_mask]
        self._asked = [one for one in rows if not one.row.has_mask]
        self._late = late
        self._threads = threads
        self._on_host = on_host
        self._proposes = proposes
        self._ready: Sequence[RowSamples] = []
        threads.look_ahead([(one.row, one.drafts) for one in self._masked if one.drafts], on_host)

    def ready(self, arrays: ArrayLibrary) -> TokenBitmask | None:
        """Return masks for the rows that draw under them at once: those that are there now, or `PATIENCE` later.

        None if there are none.
        """
        # Many rows share a job, and to ask one takes a lock.
        jobs = {one.row.job for one in self._masked}
        done = {job for job in jobs if job.done()}
        if len(done) < len(jobs):
            done = wait(jobs, PATIENCE).done
        self._ready = [one for one in self._masked if one.row.job in done]
        for one in self._ready:
            one.trim()
        return _bitmask([one.masks for one in self._ready if one.row.masks_first and not one.row.is_free], arrays)

    def deciding(self, token_ids: Array) -> TokenBitmask | None:
        """Return, after `ready`, masks of rows that redraw where their mask rejects what they drew; None: no row.

        On the host these are the rows whose draw is rejected; elsewhere all that drew optimistically.

        Args:
            token_ids: [S] integers, the sampled tokens; negative where there was nothing to draw from.
        """
        arrays = library_of(token_ids)
        if self._on_host and self._asked:
            self._ready = [*self._ready, *self._ask(token_ids.tolist())]
        decided = [one for one in self._ready if not one.row.masks_first]
        if self._on_host:
            tokens = token_ids.tolist()
            return _bitmask([refused for one in decided for refused in one.refused(tokens)], arrays)
        return _bitmask([one.masks for one in decided if not one.row.is_free], arrays)

    def _ask(self, tokens: Sequence[int]) -> list[RowSamples]:
        """Let rows without a mask take in what they drew; return those whose mask has been filled instead."""
        started = time.thread_time()
        filled = [one for one in self._asked if not one.take_samples(tokens, one.row.accepts)]
        if time.thread_time() - started > SLOW_SECONDS:
            for one in self._asked:
                one.row.is_slow = True
        # Sampled again, it may be the draft after all.
        drafted = [(one.row, one.drafts[one.num_taken :]) for one in filled if not one.row.is_slow]
        self._threads.look_ahead([one for one in drafted if one[1]], at_once=True)
        for one in filled:
            one.trim()
        return filled

    def take_samples(self, token_ids: IntArray) -> dict[int, str]:
        """Take in the sampled tokens, find those that must follow, and begin the next masks.

        Args:
            token_ids: [S] int32, negative where a row could draw nothing; set to -1 where it goes without a token, and
                behind the last one that it has taken in.

        Returns:
            Why a grammar cannot go on, by the index of its row's first sample.
        """
        tokens = token_ids.tolist()
        alive = [one for one in self._ready if not one.row.failure]
        for one in alive:
            one.take_samples(tokens, one.row.note_token)
        # What fails behind a draft fails in the next step again.
        failures = {one.index: one.row.failure for one in self._ready if one.row.failure and not one.num_taken}
        void = [*self._late]
        for one in (*self._masked, *self._asked):
            void += range(one.index + one.num_taken, one.index + one.count)
        if void:
            token_ids[void] = -1
        if self._proposes:
            self._propose(tokens)
        self._go_on([one.row for one in alive])
        return failures

    def _propose(self, tokens: list[int]) -> None:
        for one in (*self._masked, *self._asked):
            if one.num_taken and (forced := one.row.forced(tokens[one.index : one.index + one.num_taken])):
                self.proposals[one.index] = forced

    def _go_on(self, rows: Sequence[RowGrammar]) -> None:
        """Prepare the next token: of `rows` that have sampled with a mask, and of those whose matcher took theirs."""
        if not self._on_host:
            self._threads.begin_masks(rows)
            return
        accepted = [one.row for one in self._asked if not one.row.has_mask]
        slow = [row for row in (*rows, *accepted) if row.is_slow]
        # The model takes all cores: a thread would get no time of its own, and handing it the work takes longer.
        for row in rows:
            if not row.is_slow:
                row.follow() if row.goes_unmasked else row.advance()
        self._threads.begin_masks(slow)


class GrammarRows(RowExtension):
    """The grammars of all rows.

    Args:
        template: gives the compiled grammar of a text.
        on_host: the model runs on the processors that masks are filled by.
        proposes: steps propose the tokens that grammars force to follow.
    """

    def __init__(
        self,
        template: Callable[[str], Any | None],
        vocab_size: int,
        on_host: bool = False,
        proposes: bool = False,
    ) -> None:
        self._template = template
        self._vocab_size = vocab_size
        self._on_host = on_host
        self._proposes = proposes
        self._rows: dict[int, RowGrammar] = {}
        self._threads = MaskThreads()

    @classmethod
    def without_grammars(cls) -> Self:
        """Return the rows of an engine none of whose requests has a grammar."""
        return cls(lambda text: None, 0)

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in the grammars of new rows."""
        self.set(plan.new_rows)
        return {}

    def set(self, new_rows: Iterable[AdmittedRequest]) -> None:
        """Give these requests their rows; nothing is left of the rows' former requests."""
        begun = []
        for new in new_rows:
            self._rows.pop(new.row, None)
            grammar = new.params.grammar
            if grammar is not None and (template := self._template(grammar.text)) is not NO_CONSTRAINT:
                row = RowGrammar(template, new, self._vocab_size, self._on_host)
                self._rows[new.row] = row
                if row.has_mask:
                    begun.append(row)
        self._threads.begin_masks(begun)

    def step(
        self,
        rows: npt.NDArray[np.integer],
        positions: npt.NDArray[np.integer],
        drafts: npt.NDArray[np.integer] | None = None,
    ) -> GrammarStep | None:
        """Return the grammars among the rows that sample in a step; None if there are none.

        Args:
            rows, positions: [S] int32; the row of each, and the index in its sequence of the token it samples.
            drafts: [S] int32, what was drafted for that token, -1 behind the last draft of a row; None: nothing was.
        """
        if not self._rows:
            return None
        drafted = [-1] * len(rows) if drafts is None else drafts.tolist()
        due: list[RowSamples] = []
        late: list[int] = []
        end = 0
        for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            start, end = end, end if drafted[index] >= 0 else index + 1
            grammar = self._rows.get(row)
            if grammar is None or end == start:
                continue
            first = position - index + start
            if grammar.position == first:
                due.append(RowSamples(grammar, start, drafted[start:index]))
            else:
                late += range(start, end)
        return GrammarStep(due, late, self._threads, self._on_host, self._proposes) if due or late else None

    def concerns(self, rows: npt.NDArray[np.integer]) -> bool:
        """Return True if any of these rows has a grammar."""
        return bool(self._rows) and any(row in self._rows for row in rows.tolist())

    def close(self) -> None:
        """End the threads."""
        self._threads.close()


def _bitmask(masks: Sequence[tuple[int, IntArray]], arrays: ArrayLibrary) -> TokenBitmask | None:
    """Join the masks of successive samples, with the index of the first, for each row; None if there are none."""
    indices = [index + number for index, own in masks for number in range(len(own))]
    if not indices:
        return None
    bits = masks[0][1] if len(masks) == 1 else np.concatenate([own for _, own in masks])
    return TokenBitmask(arrays.from_host(np.array(indices, dtype=np.int64)), arrays.from_host(bits))
