"""`DeviceDrafts`: draft behind each step with a second decoder on a device that the host does not wait for.

The same KV and the same scratch pages as `DraftModel`'s. But the step's tokens are on the device alone when drafting is
issued, right behind the step; how many of them count, the device finds out by itself. So all drafts of a step are made
without the host, and come to it with the step's tokens.

    copies    |arrays N, with the rows to draft for|
    compute   |forward N, sample|known tokens|newest, draft, draft ...|tokens and drafts to the host|event|
    host      issue, then wait for one event

The newest tokens and all passes behind them are one graph; the known tokens before them, of prompts and of rows that
were not drafted for, are a pass of their own.

    tokens of a row    | known ... | last | sampled, as drafted ... | sampled, otherwise | ... in vain |
    the graph runs                        |<-- all that the step may have brought, up to 1 + k tokens ->|
    its output is taken                                             |     behind this    |

Knows rows and plans; no torch, not requests, and not the choice of the drafts that are run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.config.speculation import MOST_TOKENS
from tokenmill.core.plan import IntArray, StepPlan, StepResult
from tokenmill.core.request import Proposal
from tokenmill.engine.speculation.draft_graphs import DraftGraphs, shapes
from tokenmill.engine.speculation.draft_model import DraftingModel, Tables, num_scratch_pages
from tokenmill.engine.speculation.draft_rows import MOST_ROWS, DraftRows, LongArray, Spans
from tokenmill.engine.speculation.drafts import Fetch, Propose, StepDrafter
from tokenmill.model.attention.batch import DeviceLens, ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.platform.protocol import Platform

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray, ArrayLibrary

# In the place of a token's draft: the token was known before the step; nothing was drafted for its place.
KNOWN, UNDRAFTED = -2, -1
# Known tokens of rows for which kernels differ: alone, side by side, in front of others, and more than graphs have.
WARM_UP: tuple[list[int], ...] = ([1], [1, 1], [1, 7], [128, 128])


class DeviceTables(Tables, Protocol):
    """The tokens and pages of rows on a device; see `RowTables`."""

    arrays: ArrayLibrary
    page_starts: AnyArray


@runtime_checkable
class GraphedAttention(AttentionBackend, Protocol):
    """Attention that has a way of its own in graphs; see `PagedAttention`."""

    def in_graphs(self) -> AttentionBackend:
        """Return a backend over the same memory that attends as in CUDA graphs."""


class _Tokens(NamedTuple):
    """Tokens at the ends of their rows, [n] each: the fields of a graph's tokens.

    Attributes:
        drafts: the draft token for its place, or `KNOWN`, or `UNDRAFTED`.
        num_pages: pages of its row. scratch: the first one of the row's scratch pages.
    """

    rows: AnyArray
    positions: AnyArray
    drafts: AnyArray
    num_pages: AnyArray
    scratch: AnyArray


class _Entered(msgspec.Struct, frozen=True):
    """The host's side of a step that is drafted behind.

    Attributes:
        known: [n], places among the spans of the rows with known tokens to run first.
        lens: [n], tokens up to the last of these. query_lens: [n], these tokens.
    """

    spans: Spans
    known: LongArray
    lens: IntArray
    query_lens: IntArray


class DeviceDrafts(RowExtension, StepDrafter):
    """Greedy drafts for the rows of a step that `DraftRows` picks; all passes of a step are issued at once."""

    def __init__(
        self,
        model: DraftingModel,
        attention: GraphedAttention,
        tables: DeviceTables,
        num_tokens: int,
        max_len: int,
        platform: Platform | None,
    ) -> None:
        """
        Args:
            attention, num_tokens, max_len: see `DraftModel`.
            tables: tables of the other model's runner; their last row is spare.
            platform: captures graphs; None: every pass is issued as it comes.
        """
        num_rows, max_pages = tables.pages.shape
        self._model = model
        self._attention, self._in_graphs = attention, attention.in_graphs()
        self._tables = tables
        self._num_tokens = num_tokens
        self._max_len = max_len
        self._scratch_per_row = num_scratch_pages(num_tokens, tables.page_size) // MOST_ROWS
        self._first_scratch = attention.kv.num_pages - MOST_ROWS * self._scratch_per_row
        self._numbers = tables.arrays.arange(max_pages, "int64")
        self._nothing = tables.arrays.empty((0,), "int64")
        self._rows = DraftRows(num_rows, tables.page_size, num_tokens, max_len, first_position=0)
        padding = np.array([_Tokens(num_rows - 1, 0, UNDRAFTED, max_pages, 0)], dtype=np.int64)
        every = shapes(num_rows - 1, num_tokens, MOST_TOKENS + 1)
        self._graphs = DraftGraphs(platform, self._draft, padding, every)
        self._entered: _Entered | None = None

    def capture(self, report: Callable[[int, int], None], count: int | None = None) -> int:
        """Compile the kernels of other passes, and capture all graphs, or the largest `count`; return their number."""
        for lens in WARM_UP:
            self._run_spare(np.minimum(lens, self._max_len))
        return self._graphs.capture(report, count)

    def _run_spare(self, lens: LongArray) -> None:
        """Run known tokens of the spare row, as if it were several."""
        spare, nothing = np.full(len(lens), len(self._tables.pages) - 1, dtype=np.int32), np.zeros_like(lens)
        spans = Spans(np.arange(len(lens)), spare, nothing, lens, nothing, nothing)
        entered = _Entered(spans, spans.indices, lens.astype(np.int32), lens.astype(np.int32))
        arrays = self._known_arrays(entered)
        sent = {name: self._tables.arrays.from_host(values) for name, values in arrays.items()}
        self._model.forward(self._known_batch(entered, sent), self._attention)

    def close(self) -> None:
        """Release the graphs."""
        self._graphs.close()

    def enter(self, plan: StepPlan) -> Arrays:
        """Find what is to be run behind a step, whatever it brings; return the arrays for that."""
        self._rows.enter(plan)
        spans, self._entered = self._rows.spans(plan, plan.num_samples), None
        if spans is None:
            return {}
        num_drafted, lens = int(np.count_nonzero(spans.limits)), spans.stops - spans.starts
        # A graph takes what a row is behind by, if it is not more than a step brings.
        newest = np.where(lens <= 1 + self._num_tokens, lens, plan.num_samples[spans.indices])[:num_drafted]
        stops = spans.stops.copy()
        stops[:num_drafted] -= newest
        known = np.flatnonzero(spans.starts < stops)
        query_lens = (stops - spans.starts)[known].astype(np.int32)
        self._entered = _Entered(spans, known, stops[known].astype(np.int32), query_lens)
        arrays = self._known_arrays(self._entered) if len(known) else {}
        if num_drafted:
            arrays["draft_tokens"], arrays["draft_starts"] = self._graphs.padded(
                self._newest(plan, spans, newest), newest
            )
        return arrays

    def _known_arrays(self, entered: _Entered) -> Arrays:
        rows, starts = (part[entered.known] for part in (entered.spans.rows, entered.spans.starts))
        query_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(entered.query_lens, out=query_starts[1:])
        positions = np.arange(query_starts[-1], dtype=np.int64)
        positions += np.repeat(starts - query_starts[:-1], entered.query_lens)
        return {
            "known_rows": rows.astype(np.int64),
            "known_row_of_token": np.repeat(rows, entered.query_lens).astype(np.int64),
            "known_positions": positions,
            "known_lens": entered.lens,
            "known_starts": query_starts,
        }

    def _newest(self, plan: StepPlan, spans: Spans, lens: LongArray) -> npt.NDArray[np.int64]:
        """Return the last `lens` tokens of the rows to draft for, [n, fields] int64: all that the step may bring."""
        own = np.repeat(np.arange(len(lens)), lens)
        positions = np.arange(len(own)) + np.repeat(spans.stops[: len(lens)] - np.cumsum(lens), lens)
        # The place of each among the samples of its row; those before the first were known.
        num_samples = plan.num_samples[spans.indices]
        places = positions - (spans.stops - num_samples)[own]
        drafts = np.where(places < 0, KNOWN, UNDRAFTED)
        if plan.draft_ids is not None:
            begins = np.cumsum(np.maximum(plan.num_samples - 1, 0)) - np.maximum(plan.num_samples - 1, 0)
            is_drafted = (places >= 0) & (places < num_samples[own] - 1)
            drafts[is_drafted] = plan.draft_ids[(begins[spans.indices][own] + places)[is_drafted]]
        scratch = self._first_scratch + own * self._scratch_per_row
        return np.stack(_Tokens(spans.rows[own], positions, drafts, spans.num_pages[own], scratch), axis=1)

    def follow(self, plan: StepPlan, sent: Sent, fetch: Fetch) -> Propose:
        """Issue all passes behind a step; return a function that proposes once it has ended."""
        entered, self._entered = self._entered, None
        if entered is not None and len(entered.known):
            self._model.forward(self._known_batch(entered, sent), self._attention)
        if entered is None or not (num_drafted := int(np.count_nonzero(entered.spans.limits))):
            return lambda result: {}
        drafts = self._graphs.run(sent["draft_tokens"], sent["draft_starts"])
        self._rows.drafted(entered.spans.rows[:num_drafted], np.ones(num_drafted, dtype=np.bool_))
        (on_host,) = fetch(drafts[:num_drafted])
        return partial(self._proposals, entered.spans, on_host)

    def _proposals(self, spans: Spans, drafts: LongArray, result: StepResult) -> dict[int, Proposal]:
        """Return the drafts behind rows that the step has brought a token, up to the first that is missing."""
        behind = np.arange(drafts.shape[1]) < spans.limits[: len(drafts), None]
        lengths = ((drafts >= 0) & behind).cumprod(axis=1).sum(axis=1)
        lengths *= np.diff(result.token_starts)[spans.indices[: len(drafts)]] > 0
        return {
            index: Proposal(drafts[place, :length].astype(np.int32), is_forced=False)
            for place, (index, length) in enumerate(zip(spans.indices.tolist(), lengths.tolist(), strict=False))
            if length
        }

    def _known_batch(self, entered: _Entered, sent: Sent) -> ForwardBatch:
        tables, xp, page_size = self._tables, self._tables.arrays, self._tables.page_size
        row_of_token, positions, lens = sent["known_row_of_token"], sent["known_positions"], sent["known_lens"]
        num_pages = -(-int(entered.lens.max()) // page_size)
        page_table = tables.pages[sent["known_rows"], :num_pages]
        page_table *= tables.page_starts[:num_pages] < lens[:, None]
        query_starts = np.zeros(len(entered.lens) + 1, dtype=np.int32)
        np.cumsum(entered.query_lens, out=query_starts[1:])
        page_of_token = xp.astype(tables.pages[row_of_token, positions // page_size], "int64")
        return ForwardBatch(
            token_ids=xp.astype(tables.tokens[row_of_token, positions], "int64"),
            positions=positions,
            slots=page_of_token * page_size + positions % page_size,
            page_table=page_table,
            query_lens=entered.query_lens,
            context_lens=entered.lens,
            query_starts=query_starts,
            output_indices=self._nothing,
            lens=DeviceLens(lens, sent["known_starts"]),
        )

    def _draft(self, tokens: AnyArray, starts: AnyArray) -> tuple[AnyArray]:
        """Run the newest tokens of n rows, and go on from the last one of each that counts; see `DraftGraphs`."""
        xp, width = self._tables.arrays, len(tokens) // (len(starts) - 1)
        own = _Tokens(*(xp.copy(tokens[:, field]) for field in range(len(_Tokens._fields))))
        token_ids = xp.astype(self._tables.tokens[own.rows, own.positions], "int64")
        begins = xp.astype(starts, "int64")
        first, last = begins[:-1], begins[1:] - 1
        newest = first
        if width > 1:
            places = first[:, None] + xp.arange(width, "int64")
            places = xp.where(places < last[:, None], places, last[:, None])
            is_right = (own.drafts == KNOWN) | (own.drafts == token_ids)
            newest = first + is_right[places].cumprod(1).sum(1)
        rows = _Tokens(*(part[newest] for part in own))
        pages = self._pages(rows)
        lens = xp.astype(own.positions[last] + 1, "int32")
        best = self._best(own, token_ids, pages, DeviceLens(lens, starts), newest)
        drafts = xp.empty((len(first), self._num_tokens), "int64")
        drafts[:, 0] = best
        each, every = xp.arange(len(starts), "int32"), xp.arange(len(first), "int64")
        for number in range(1, self._num_tokens):
            # Behind the last position they are not used, and write to page 0.
            further = rows._replace(positions=rows.positions + number)
            places = further.positions.clip(max=self._max_len - 1)
            lens = DeviceLens(xp.astype(places + 1, "int32"), each)
            best = drafts[:, number] = self._best(further, xp.at_least(best, 0), pages, lens, every)
        return (drafts,)

    def _best(self, own: _Tokens, token_ids: AnyArray, pages: AnyArray, lens: DeviceLens, newest: AnyArray) -> AnyArray:
        """Run tokens; return the most likely ones behind those at `newest`, -1 where there are no finite numbers."""
        n, rows = len(token_ids), len(pages)
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=own.positions.clip(max=self._max_len - 1),
            slots=self._slots(own),
            page_table=pages,
            query_lens=np.full(rows, n // rows, dtype=np.int32),
            context_lens=np.full(rows, self._tables.tokens.shape[1], dtype=np.int32),
            query_starts=np.arange(0, n + 1, n // rows, dtype=np.int32),
            output_indices=newest,
            lens=lens,
        )
        return self._model.argmax(self._model.forward(batch, self._in_graphs))

    def _pages(self, rows: _Tokens) -> AnyArray:
        """Build the page table: each row's own pages, then its scratch pages."""
        behind = self._numbers - rows.num_pages[:, None]
        is_scratch = (behind >= 0) & (behind < self._scratch_per_row)
        pages = self._tables.pages[rows.rows] * (behind < 0) + (rows.scratch[:, None] + behind) * is_scratch
        return self._tables.arrays.astype(pages, "int32")

    def _slots(self, own: _Tokens) -> AnyArray:
        """Return the KV slots of tokens; behind the last position that of page 0."""
        tables, page_size = self._tables, self._tables.page_size
        places = own.positions.clip(max=self._max_len - 1)
        behind = places // page_size - own.num_pages
        shared = tables.arrays.astype(tables.pages[own.rows, places // page_size], "int64")
        pages = tables.arrays.where(behind < 0, shared, own.scratch + behind)
        return pages * (own.positions < self._max_len) * page_size + places % page_size
