"""`DraftModel`: a second, smaller decoder that proposes what may follow, behind each step of the model.

Its KV lies under the page ids of the model's: what fills a page there fills it here, so whoever finds a prefix in the
cache finds both. A row's newest tokens may stand beyond its pages, and drafts do; these are in scratch pages, which
nobody else has and which are written anew each time.

    tokens   | computed before | of this step | newest | drafts ... |
    pages    |   a   |   b   |   c   |   d    |  scratch  |  scratch  |
             |<---- pinned by this step ----->|

Whatever is in those pages, the model verifies what is proposed: KV that is missing or wrong makes drafts wrong, and no
token of an output. Knows rows and plans; not requests, and not who decides which drafts are run.

A head that needs the model's hidden states (EAGLE-3, MTP) would stand where this one does. `ModelRunner.start` has
them, as `outputs` of those tokens that are sampled from; such a head needs them of every token of a step and of
several layers, and KV of its own for them, which a prefix from the cache has here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tokenmill.attention.batch import ForwardBatch
from tokenmill.attention.protocol import AttentionBackend
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.plan import IntArray, StepPlan, StepResult
from tokenmill.core.request import Proposal
from tokenmill.model_files import read_json
from tokenmill.models.architecture import Architecture
from tokenmill.runner.model import Model
from tokenmill.runner.row_tables import RowTables

# Rows that are drafted for in a step at most: beyond, a step is busy with the tokens of its requests.
MOST_ROWS = 32
# Steps that a row whose drafts nobody runs sits out at most, before it is drafted for again.
MOST_REST = 15


def num_scratch_pages(num_tokens: int, page_size: int) -> int:
    """Pages of a draft model's KV cache besides those that it shares, for drafts of so many tokens.

    A row's newest token and all of its drafts but the last are run: so many positions behind its pages at most.
    """
    return MOST_ROWS * -(-num_tokens // page_size)


@dataclass(frozen=True, slots=True)
class _Chase:
    """What the draft model has to run of n rows to come up with a step, and how far it may draft behind each.

    Attributes:
        indices: [n], places in the step's batch. rows: [n].
        starts, stops: [n], the positions that it runs: from the first, up to before the second.
        limits: [n], tokens to draft; 0: none.
        pages: [n, P], page ids, those of scratch pages among them; 0 where nothing is run.
    """

    indices: npt.NDArray[np.int64]
    rows: IntArray
    starts: IntArray
    stops: IntArray
    limits: IntArray
    pages: IntArray


class DraftModel:
    """Greedy drafts for the rows of a step, all rows in one pass a token.

    Rows whose drafts were not run are drafted for more rarely, up to every sixteenth step: whoever decides may find
    that drafts do not pay, and drafting costs.
    """

    def __init__(
        self, model: Model, attention: AttentionBackend, tables: RowTables, num_tokens: int, max_len: int
    ) -> None:
        """
        Args:
            attention: of this model, over the pages of the other model's and `num_scratch_pages` behind them.
            tables: of the other model's runner, on the host.
            num_tokens: to draft at most.
            max_len: tokens that the draft model can hold; behind them there are no drafts.
        """
        num_rows = len(tables.tokens)
        self._model = model
        self._attention = attention
        self._tables = tables
        self._tokens, self._pages = tables.tokens.numpy(), tables.pages.numpy()
        self._num_tokens = num_tokens
        self._max_len = max_len
        self._scratch_per_row = num_scratch_pages(num_tokens, tables.page_size) // MOST_ROWS
        self._first_scratch = attention.kv.num_pages - MOST_ROWS * self._scratch_per_row
        # Where the text of each row ends at the latest; 0: no drafts for it.
        self._ends = np.zeros(num_rows, dtype=np.int64)
        # Whether a page of the row already holds the newest token, which the model has yet to run.
        self._is_ahead = np.zeros(num_rows, dtype=np.bool_)
        # Whether it has drafts of the step before, and how many steps it sits out, now and the last time.
        self._has_drafts = np.zeros(num_rows, dtype=np.bool_)
        self._rest, self._last_rest = np.zeros((2, num_rows), dtype=np.int64)

    @torch.inference_mode()
    def propose(self, plan: StepPlan, result: StepResult) -> dict[int, Proposal]:
        """Run the tokens of a step that has ended, before anything of the next one is done, and draft behind them.

        Returns:
            By batch index, what may follow the tokens that the step brings; of no token nothing.
        """
        self._enter(plan)
        chase = self._chase(plan, np.diff(result.token_starts))
        if not len(chase.rows):
            return {}
        outputs = self._run_known(chase)
        drafted = np.flatnonzero(chase.limits)
        if not len(drafted):
            return {}
        # Those with the longest drafts first: the rows of each further pass are the first ones of the pass before.
        order = np.argsort(-chase.limits[drafted], kind="stable")
        drafted, ids = drafted[order], self._model.argmax(outputs)[torch.from_numpy(order)]
        drafts = self._decode(chase, drafted, ids)
        limits = np.minimum(chase.limits[drafted], (drafts >= 0).cumprod(axis=1).sum(axis=1))
        self._has_drafts[chase.rows[drafted]] = limits > 0
        columns = zip(chase.indices[drafted].tolist(), drafts, limits.tolist(), strict=True)
        return {index: Proposal(token_ids[:limit], is_forced=False) for index, token_ids, limit in columns if limit}

    def _enter(self, plan: StepPlan) -> None:
        """Take in new rows, and what has become of the drafts of the others."""
        for new in plan.new_rows:
            row, params = new.row, new.params
            is_drafted_for = params.grammar is None and not new.pooling
            end = self._max_len if params.max_tokens is None else new.num_prompt_tokens + params.max_tokens
            self._ends[row] = min(end, self._max_len) if is_drafted_for else 0
            self._is_ahead[row] = self._has_drafts[row] = False
            self._rest[row] = self._last_rest[row] = 0
        rows = plan.rows[plan.num_samples > 0]
        are_run = plan.num_samples[plan.num_samples > 0] > 1
        in_vain = self._has_drafts[rows] & ~are_run
        longer = np.where(in_vain, np.minimum(2 * self._last_rest[rows] + 1, MOST_REST), self._last_rest[rows])
        self._last_rest[rows] = np.where(are_run, 0, longer)
        self._rest[rows] = np.where(in_vain, longer, self._rest[rows]) * ~are_run
        self._has_drafts[rows] = False

    def _chase(self, plan: StepPlan, num_brought: IntArray) -> _Chase:
        """What there is to run.

        Args:
            num_brought: [B], tokens that the step brings.
        """
        rows, page_size = plan.rows, self._tables.page_size
        launched = plan.num_computed + plan.num_scheduled
        samples = num_brought > 0
        known = launched - np.maximum(plan.num_samples - num_brought, 0) + samples
        num_pages = -(-launched // page_size)
        room = np.minimum(self._ends[rows] - known - 1, self._num_tokens)
        limits = np.where(samples & (self._rest[rows] == 0), np.maximum(room, 0), 0)
        self._rest[rows] = np.maximum(self._rest[rows] - samples, 0)
        limits[np.cumsum(limits > 0) > MOST_ROWS] = 0
        starts = plan.num_computed + self._is_ahead[rows]
        held = np.minimum(known, num_pages * page_size)
        self._is_ahead[rows] = samples & (known == held)
        stops = np.minimum(np.where(limits > 0, known, held), self._max_len)
        indices = np.flatnonzero(starts < stops)
        parts = (part[indices].astype(np.int32) for part in (rows, starts, stops, limits, num_pages))
        rows, starts, stops, limits, num_pages = parts
        return _Chase(indices, rows, starts, stops, limits, self._pages_of(rows, num_pages, stops, limits))

    def _pages_of(self, rows: IntArray, num_pages: IntArray, stops: IntArray, limits: IntArray) -> IntArray:
        """The page table: of each row its `num_pages` first pages, then, where it is drafted for, its scratch pages."""
        width = -(-int((stops + np.maximum(limits - 1, 0)).max(initial=0)) // self._tables.page_size)
        behind = np.arange(width, dtype=np.int32) - num_pages[:, None]
        scratch = self._first_scratch + (np.cumsum(limits > 0)[:, None] - 1) * self._scratch_per_row + behind
        is_scratch = (behind < self._scratch_per_row) & (limits > 0)[:, None]
        pages = np.where(behind < 0, self._pages[rows, :width], np.where(is_scratch, scratch, 0))
        return np.ascontiguousarray(pages, dtype=np.int32)

    def _run_known(self, chase: _Chase) -> torch.Tensor:
        """Run the known tokens; the outputs [., hidden_size] of the newest of those that are drafted for."""
        lens = chase.stops - chase.starts
        query_starts = np.zeros(len(lens) + 1, dtype=np.int32)
        np.cumsum(lens, out=query_starts[1:])
        own = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(query_starts[-1]) + np.repeat(chase.starts - query_starts[:-1], lens)
        page_size = self._tables.page_size
        batch = ForwardBatch(
            token_ids=torch.from_numpy(self._tokens[chase.rows[own], positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            slots=torch.from_numpy(_slots(chase.pages[own, positions // page_size], positions, page_size)),
            page_table=torch.from_numpy(chase.pages),
            query_lens=lens,
            context_lens=chase.stops,
            query_starts=query_starts,
            output_indices=torch.from_numpy(query_starts[1:][chase.limits > 0].astype(np.int64) - 1),
        )
        return self._model.forward(batch, self._attention)

    def _decode(self, chase: _Chase, drafted: npt.NDArray[np.int64], ids: torch.Tensor) -> IntArray:
        """Go on from the first draft token of each row.

        Args:
            drafted: [m], the rows by their places, those with the longest drafts first.
            ids: [m] int64, first tokens.

        Returns:
            [m, k] int32, -1 from where the draft model has no numbers, and behind the row's limit.
        """
        limits, pages = chase.limits[drafted], chase.pages[drafted]
        page_size, num_rows = self._tables.page_size, np.arange(len(drafted))
        lens = np.ones(len(drafted), dtype=np.int32)
        query_starts = np.arange(len(drafted) + 1, dtype=np.int32)
        drafts = np.full((len(drafted), limits[0]), -1, dtype=np.int32)
        drafts[:, 0] = ids.numpy()
        for number in range(1, limits[0]):
            count = int(np.count_nonzero(limits > number))
            positions = (chase.stops[drafted[:count]] + (number - 1)).astype(np.int64)
            slots = _slots(pages[num_rows[:count], positions // page_size], positions, page_size)
            batch = ForwardBatch(
                token_ids=ids[:count].clamp(min=0),
                positions=torch.from_numpy(positions),
                slots=torch.from_numpy(slots),
                page_table=torch.from_numpy(pages[:count]),
                query_lens=lens[:count],
                context_lens=(positions + 1).astype(np.int32),
                query_starts=query_starts[: count + 1],
                output_indices=torch.from_numpy(num_rows[:count]),
            )
            ids = self._model.argmax(self._model.forward(batch, self._attention))
            drafts[:count, number] = ids.numpy()
        return drafts


def _slots(pages: IntArray, positions: npt.NDArray[np.int64], page_size: int) -> npt.NDArray[np.int64]:
    return pages.astype(np.int64) * page_size + positions % page_size


def check_draft(architecture: Architecture, tokenizer: Path, draft: Architecture, folder: Path) -> None:
    """See that a draft model means the same by a token id.

    Args:
        architecture, tokenizer: of the model, and the folder of its tokenizer.json.
        draft, folder: of the draft model.

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
    """32 hexadecimal digits that two folders share if each id stands for the same text in both."""
    tokenizer = read_json(folder, "tokenizer.json")
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    tokens = [(one.get("id"), one.get("content")) for one in added] if isinstance(added, list) else []
    vocabulary = {"vocab": model.get("vocab") if isinstance(model, dict) else None, "added": tokens}
    return blake2b(msgspec.json.encode(vocabulary, order="sorted"), digest_size=16).hexdigest()
