"""`DraftModel`: propose what may follow each step of the model, with a second, smaller decoder.

Its KV lies under the page ids of the model's: what fills a page there fills it here, so a request that finds a prefix
in the cache finds both. A row's newest tokens may stand beyond its pages, and drafts do; these are in scratch pages,
which no other row uses and which are written anew each time.

    tokens   | computed before | of this step | newest | drafts ... |
    pages    |   a   |   b   |   c   |   d    |  scratch  |  scratch  |
             |<---- pinned by this step ----->|

Whatever is in those pages, the model verifies what is proposed: KV that is missing or wrong makes drafts wrong, and no
token of an output. Knows rows and plans; not requests, and not the choice of the drafts that are run.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.plan import IntArray, StepPlan, StepResult
from tokenmill.core.request import Proposal
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray

LongArray = npt.NDArray[np.int64]

# Rows that are drafted for in a step at most: beyond, a step is busy with the tokens of its requests.
MOST_ROWS = 32
# Steps that a row whose drafts are not run sits out at most, before it is drafted for again.
MOST_REST = 31


class DraftingModel(Protocol):
    """The part of a decoder that drafts need."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend, hidden: AnyArray | None = None) -> Any:
        """Return the final hidden states of the batch's `output_indices`."""

    def argmax(self, outputs: Any) -> AnyArray:
        """Return the most likely tokens, [S] int64; -1 where logits are NaN or infinite."""


class Tables(Protocol):
    """The tokens and pages of rows; see `RowTables`."""

    tokens: AnyArray
    pages: AnyArray
    page_size: int


def num_scratch_pages(num_tokens: int, page_size: int) -> int:
    """Return the pages of a draft model's KV cache besides the shared ones, for drafts of `num_tokens` tokens.

    A row's newest token and all of its drafts but the last are run: `num_tokens` positions behind its pages at most.
    """
    return MOST_ROWS * -(-num_tokens // page_size)


class _Chase(msgspec.Struct, frozen=True):
    """Positions of n rows that the draft model has to run to catch up with a step, and how far to draft behind each.

    Attributes:
        indices: [n], places in the step's batch, those with the longest drafts first. rows: [n].
        starts, stops: [n], the positions that it runs: from the first, up to before the second.
        limits: [n], tokens to draft; 0: none.
        pages: [n, P] int32, page ids, those of scratch pages among them; 0 where nothing is run.
    """

    indices: LongArray
    rows: IntArray
    starts: LongArray
    stops: LongArray
    limits: LongArray
    pages: IntArray


class DraftModel:
    """Greedy drafts for the rows of a step, all rows in one pass a token.

    Rows whose drafts were not run are drafted for more rarely, up to every thirty-second step: the scheduler may find
    that drafts do not pay, and drafting costs. Of the other rows the model runs whole pages, as they are filled: the
    prefix cache may give these to any request.

    Attributes:
        first_position: of a text that is run; a draft head has nothing before it.
    """

    first_position = 0

    def __init__(
        self, model: DraftingModel, attention: AttentionBackend, tables: Tables, num_tokens: int, max_len: int
    ) -> None:
        """
        Args:
            attention: this model's attention, over the pages of the other model and `num_scratch_pages` behind them.
            tables: tables of the other model's runner, on the host.
            num_tokens: most tokens to draft.
            max_len: tokens that the draft model can hold; behind them there are no drafts.
        """
        num_rows = len(tables.tokens)
        self._model = model
        self._attention = attention
        self._tokens, self._pages, self._page_size = tables.tokens, tables.pages, tables.page_size
        self._num_tokens = num_tokens
        self._max_len = max_len
        self._scratch_per_row = num_scratch_pages(num_tokens, tables.page_size) // MOST_ROWS
        self._first_scratch = attention.kv.num_pages - MOST_ROWS * self._scratch_per_row
        # Where the text of each row ends at the latest; 0: no drafts for it.
        self._ends = np.zeros(num_rows, dtype=np.int64)
        # Tokens of each row whose KV is in its pages.
        self._num_written = np.zeros(num_rows, dtype=np.int64)
        # Whether it has drafts of a step before; how many steps it sat out the last time, and when that ends.
        self._has_drafts = np.zeros(num_rows, dtype=np.bool_)
        self._rest, self._next_step = np.zeros((2, num_rows), dtype=np.int64)
        # Where a new row begins: with the shortest rest of those that were judged last.
        self._newest_rest = 0

    def propose(self, plan: StepPlan, result: StepResult) -> dict[int, Proposal]:
        """Run what a step has brought, and draft behind it. Called once it has ended, before the next one begins.

        Returns:
            Proposals of what may follow the tokens that the step brings, by batch index.
        """
        self._enter(plan)
        chase = self._chase(plan, result.token_starts[1:] - result.token_starts[:-1])
        if chase is None:
            return {}
        outputs = self._run_known(chase)
        drafted = np.flatnonzero(chase.limits)
        if not len(drafted):
            return {}
        drafts = self._decode(chase, drafted, self._best(outputs))
        lengths = (drafts >= 0).cumprod(axis=1).sum(axis=1)
        self._has_drafts[chase.rows[drafted]] = lengths > 0
        indices, ends = chase.indices[drafted].tolist(), lengths.tolist()
        return {
            index: self._proposal(place, drafts[place, :length])
            for place, (index, length) in enumerate(zip(indices, ends, strict=True))
            if length
        }

    def _enter(self, plan: StepPlan) -> None:
        """Take in new rows, and which drafts of the other rows were run."""
        num_computed = dict(zip(plan.rows.tolist(), plan.num_computed.tolist(), strict=True)) if plan.new_rows else {}
        for new in plan.new_rows:
            row, params = new.row, new.params
            is_drafted_for = params.grammar is None and new.pooling is None
            end = self._max_len if params.max_tokens is None else new.num_prompt_tokens + params.max_tokens
            self._ends[row] = min(end, self._max_len) if is_drafted_for else 0
            # What it has computed it has found in the cache, or filled before it paused: whole pages are written.
            written = num_computed[row] // self._page_size * self._page_size
            self._num_written[row] = max(written, self.first_position)
            self._has_drafts[row] = False
            self._rest[row], self._next_step[row] = self._newest_rest, plan.step + self._newest_rest
        judged = self._has_drafts[plan.rows] & (plan.num_samples > 0)
        if judged.any():
            rows, are_run = plan.rows[judged], plan.num_samples[judged] > 1
            self._rest[rows] = np.where(are_run, 0, np.minimum(2 * self._rest[rows] + 1, MOST_REST))
            self._next_step[rows] = plan.step + self._rest[rows]
            self._newest_rest = int(self._rest[rows].min())
            self._has_drafts[rows] = False

    def _chase(self, plan: StepPlan, num_brought: IntArray) -> _Chase | None:
        """Find the positions to run and draft for; None if there are none.

        Args:
            num_brought: [B], tokens that the step brings.
        """
        rows, page_size, samples = plan.rows, self._page_size, num_brought > 0
        # What a step ran in vain, behind a token that was then drawn again, is run anew.
        starts = self._num_written[rows] = np.minimum(self._num_written[rows], plan.num_computed + 1)
        launched = plan.num_computed + plan.num_scheduled
        ends = launched - np.maximum(plan.num_samples - num_brought, 0)
        filled = np.minimum(ends - ends % page_size, self._max_len)
        is_due = samples & (self._next_step[rows] <= plan.step)
        if not is_due.any() and (filled <= starts).all():
            return None
        known = ends + samples
        limits = np.where(is_due, np.minimum(self._ends[rows] - known - 1, self._num_tokens).clip(min=0), 0)
        limits[np.cumsum(limits > 0) > MOST_ROWS] = 0
        stops = np.where(limits > 0, known, filled)
        num_pages = -(-launched // page_size)
        self._num_written[rows] = np.maximum(starts, np.minimum(stops, num_pages * page_size))
        indices = np.flatnonzero(starts < stops)
        if not len(indices):
            return None
        # Those with the longest drafts first: the rows of each further pass are the first ones of the pass before.
        indices = indices[np.argsort(-limits[indices], kind="stable")]
        rows, starts, stops, limits = rows[indices], starts[indices], stops[indices], limits[indices]
        pages = self._pages_of(rows, num_pages[indices], stops, limits)
        return _Chase(indices, rows, starts, stops, limits, pages)

    def _pages_of(self, rows: IntArray, num_pages: IntArray, stops: LongArray, limits: LongArray) -> IntArray:
        """Build the page table: each row's `num_pages` first pages, then its scratch pages if it is drafted for."""
        width = -(-int((stops + np.maximum(limits - 1, 0)).max()) // self._page_size)
        pages: IntArray = self._pages[rows, :width]
        if width > num_pages.min():
            behind = np.arange(width) - num_pages[:, None]
            scratch = self._first_scratch + (np.cumsum(limits > 0) - 1)[:, None] * self._scratch_per_row + behind
            is_scratch = (behind < self._scratch_per_row) & (limits > 0)[:, None]
            pages = np.where(behind < 0, pages, np.where(is_scratch, scratch, 0)).astype(np.int32)
        return pages

    def _run_known(self, chase: _Chase) -> Any:
        """Run the known tokens; return outputs [., hidden_size] of the newest token of each row to draft for."""
        lens = (chase.stops - chase.starts).astype(np.int32)
        query_starts = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(lens, out=query_starts[1:])
        own = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(query_starts[-1]) + np.repeat(chase.starts - query_starts[:-1], lens)
        batch = ForwardBatch(
            token_ids=self._tokens[chase.rows[own], positions].astype(np.int64),
            positions=positions,
            slots=self._slots(chase.pages, own, positions),
            page_table=chase.pages,
            query_lens=lens,
            context_lens=chase.stops.astype(np.int32),
            query_starts=query_starts,
            output_indices=query_starts[1:][chase.limits > 0].astype(np.int64) - 1,
        )
        return self._forward_known(batch, self._slots(chase.pages, own, np.maximum(positions - 1, 0)))

    def _forward_known(self, batch: ForwardBatch, slots_before: LongArray) -> Any:
        """Run known tokens. `slots_before`: [T], of the tokens before them."""
        return self._model.forward(batch, self._attention)

    def _forward_drafts(self, batch: ForwardBatch) -> Any:
        """Run the newest draft of each of the first rows of the pass before."""
        return self._model.forward(batch, self._attention)

    def _best(self, outputs: Any) -> LongArray:
        """Return the most likely tokens, -1 where there are no finite numbers."""
        return np.asarray(self._model.argmax(outputs))

    def _goes_on(self, count: int) -> bool:
        """Return True if further drafts of the first `count` rows of the first pass are worth a pass."""
        return True

    def _proposal(self, place: int, token_ids: IntArray) -> Proposal:
        """Make the proposal of a row, given its place in the first pass."""
        return Proposal(token_ids, is_forced=False)

    def _decode(self, chase: _Chase, drafted: LongArray, ids: LongArray) -> IntArray:
        """Go on from the first draft token of each row.

        Args:
            drafted: [m], places of the rows, the first ones. ids: [m] int64, first tokens.

        Returns:
            [m, k] int32, -1 from where the draft model has no finite numbers, and behind the row's limit.
        """
        limits, pages = chase.limits[drafted], chase.pages[drafted]
        own, ones = np.arange(len(drafted)), np.ones(len(drafted), dtype=np.int32)
        drafts = np.full((len(drafted), limits[0]), -1, dtype=np.int32)
        drafts[:, 0] = ids
        # Of each further pass [k - 1, m]; behind a row's limit they are not used.
        positions = chase.stops[drafted] + np.arange(limits[0] - 1)[:, None]
        slots = self._slots(pages, own, np.minimum(positions, pages.shape[1] * self._page_size - 1))
        lens = (positions + 1).astype(np.int32)
        query_starts = np.arange(len(own) + 1, dtype=np.int32)
        for number in range(1, limits[0]):
            count = int(np.count_nonzero(limits > number))
            if not self._goes_on(count):
                break
            batch = ForwardBatch(
                token_ids=np.maximum(drafts[:count, number - 1], 0).astype(np.int64),
                positions=positions[number - 1, :count],
                slots=slots[number - 1, :count],
                page_table=pages[:count],
                query_lens=ones[:count],
                context_lens=lens[number - 1, :count],
                query_starts=query_starts[: count + 1],
                output_indices=own[:count],
            )
            drafts[:count, number] = self._best(self._forward_drafts(batch))
        return drafts

    def _slots(self, pages: IntArray, own: LongArray, positions: LongArray) -> LongArray:
        """Return the KV slots of positions, each in its own row of a page table."""
        return pages[own, positions // self._page_size].astype(np.int64) * self._page_size + positions % self._page_size


def check_draft(architecture: Architecture, tokenizer: Path, draft: Architecture, folder: Path) -> None:
    """Check that a draft model means the same by a token id.

    Args:
        architecture, tokenizer: the model's architecture, and the folder of its tokenizer.json.
        draft, folder: the same of the draft model.

    Raises:
        InvalidConfig: it does not, in one sentence.
        InvalidCheckpoint: a tokenizer.json cannot be read.
    """
    if draft.vocab_size != architecture.vocab_size:
        raise InvalidConfig(
            f"--speculative-config: the draft model {folder} has a vocabulary of {draft.vocab_size:,} tokens, the "
            f"model one of {architecture.vocab_size:,}: take a draft of the same family"
        )
    if vocabulary_digest(folder) != vocabulary_digest(tokenizer):
        raise InvalidConfig(
            f"--speculative-config: the draft model {folder} has another tokenizer than the model (the tokens of "
            "tokenizer.json differ): take a draft of the same family"
        )


def vocabulary_digest(folder: Path) -> str:
    """Return 32 hexadecimal digits that two folders share if each id stands for the same text in both."""
    tokenizer = read_json(folder, "tokenizer.json")
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    tokens = [(one.get("id"), one.get("content")) for one in added] if isinstance(added, list) else []
    vocabulary = {"vocab": model.get("vocab") if isinstance(model, dict) else None, "added": tokens}
    return blake2b(msgspec.json.encode(vocabulary, order="sorted"), digest_size=16).hexdigest()
