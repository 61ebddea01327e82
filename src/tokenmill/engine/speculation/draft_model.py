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

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.plan import IntArray, StepPlan, StepResult
from tokenmill.core.request import Proposal
from tokenmill.engine.speculation.draft_rows import MOST_ROWS, DraftRows, LongArray, Spans
from tokenmill.engine.speculation.drafts import Fetch, Propose, StepDrafter
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.attention.row_extension import Sent

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray


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
    """Positions of n rows to run, and their pages.

    Attributes:
        spans: the positions, and how far to draft behind each row.
        pages: [n, P] int32, page ids, those of scratch pages among them; 0 where nothing is run.
    """

    spans: Spans
    pages: IntArray


class DraftModel(StepDrafter):
    """Greedy drafts for the rows of a step that `DraftRows` picks, all rows in one pass a token.

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
        self._model = model
        self._attention = attention
        self._tokens, self._pages, self._page_size = tables.tokens, tables.pages, tables.page_size
        self._scratch_per_row = num_scratch_pages(num_tokens, tables.page_size) // MOST_ROWS
        self._first_scratch = attention.kv.num_pages - MOST_ROWS * self._scratch_per_row
        self._rows = DraftRows(len(tables.tokens), tables.page_size, num_tokens, max_len, self.first_position)

    def capture(self, report: Callable[[int, int], None], count: int | None = None) -> int:
        """Capture nothing: the host runs a pass as it comes."""
        return 0

    def follow(self, plan: StepPlan, sent: Sent, fetch: Fetch) -> Propose:
        """Return `propose`: the host drafts once the step has ended."""
        return partial(self.propose, plan)

    def propose(self, plan: StepPlan, result: StepResult) -> dict[int, Proposal]:
        """Run what a step has brought, and draft behind it. Called once it has ended, before the next one begins.

        Returns:
            Proposals of what may follow the tokens that the step brings, by batch index.
        """
        self._rows.enter(plan)
        spans = self._rows.spans(plan, result.token_starts[1:] - result.token_starts[:-1])
        if spans is None:
            return {}
        chase = _Chase(spans, self._pages_of(spans))
        outputs = self._run_known(chase)
        drafted = np.flatnonzero(spans.limits)
        if not len(drafted):
            return {}
        drafts = self._decode(chase, drafted, self._best(outputs))
        lengths = (drafts >= 0).cumprod(axis=1).sum(axis=1)
        self._rows.drafted(spans.rows[drafted], lengths > 0)
        indices, ends = spans.indices[drafted].tolist(), lengths.tolist()
        return {
            index: self._proposal(place, drafts[place, :length])
            for place, (index, length) in enumerate(zip(indices, ends, strict=True))
            if length
        }

    def _pages_of(self, spans: Spans) -> IntArray:
        """Build the page table: each row's own pages, then its scratch pages if it is drafted for."""
        num_pages, limits = spans.num_pages, spans.limits
        width = -(-int((spans.stops + np.maximum(limits - 1, 0)).max()) // self._page_size)
        pages: IntArray = self._pages[spans.rows, :width]
        if width > num_pages.min():
            behind = np.arange(width) - num_pages[:, None]
            scratch = self._first_scratch + (np.cumsum(limits > 0) - 1)[:, None] * self._scratch_per_row + behind
            is_scratch = (behind < self._scratch_per_row) & (limits > 0)[:, None]
            pages = np.where(behind < 0, pages, np.where(is_scratch, scratch, 0)).astype(np.int32)
        return pages

    def _run_known(self, chase: _Chase) -> Any:
        """Run the known tokens; return outputs [., hidden_size] of the newest token of each row to draft for."""
        spans = chase.spans
        lens = (spans.stops - spans.starts).astype(np.int32)
        query_starts = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(lens, out=query_starts[1:])
        own = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(query_starts[-1]) + np.repeat(spans.starts - query_starts[:-1], lens)
        batch = ForwardBatch(
            token_ids=self._tokens[spans.rows[own], positions].astype(np.int64),
            positions=positions,
            slots=self._slots(chase.pages, own, positions),
            page_table=chase.pages,
            query_lens=lens,
            context_lens=spans.stops.astype(np.int32),
            query_starts=query_starts,
            output_indices=query_starts[1:][spans.limits > 0].astype(np.int64) - 1,
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
        limits, pages = chase.spans.limits[drafted], chase.pages[drafted]
        own, ones = np.arange(len(drafted)), np.ones(len(drafted), dtype=np.int32)
        drafts = np.full((len(drafted), limits[0]), -1, dtype=np.int32)
        drafts[:, 0] = ids
        # Of each further pass [k - 1, m]; behind a row's limit they are not used.
        positions = chase.spans.stops[drafted] + np.arange(limits[0] - 1)[:, None]
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
    """Check that a draft model can go back behind wrong drafts, and means the same by a token id.

    Args:
        architecture, tokenizer: the model's architecture, and the folder of its tokenizer.json.
        draft, folder: the same of the draft model.

    Raises:
        InvalidConfig: it does not, in one sentence.
        InvalidCheckpoint: a tokenizer.json cannot be read.
    """
    if draft.recurrences:
        raise InvalidConfig(
            f"--speculative-config: the draft model {folder} keeps recurrent states, which cannot go back behind wrong "
            "drafts: take a draft whose layers all attend"
        )
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
