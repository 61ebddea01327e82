"""`PlanBuilder`: collect what a step will run while the scheduler decides, then freeze it into a `StepPlan`."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from tokenmill.core.media import with_placeholders
from tokenmill.core.plan import AdmittedRequest, PageEntries, PlanStates, StepPlan
from tokenmill.core.request import Request, TokenArray
from tokenmill.core.transfers import PlanTransfers
from tokenmill.engine.kv.window_pages import WindowPages


class PlanBuilder:
    """Plan of one step in the making. Keeps the token budget."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.requests: list[Request] = []
        self._new_rows: list[AdmittedRequest] = []
        self._num_computed: list[int] = []
        self._num_scheduled: list[int] = []
        self._num_samples: list[int] = []
        self._draft_ids: list[TokenArray] = []
        self._page_rows: list[int] = []
        self._page_numbers: list[int] = []
        self._page_ids: list[int] = []
        self._window_entries: list[tuple[int, int, int]] = []

    def add_row(self, request: Request, seed: int, adapter_slot: int = 0, state_slot: int = 0) -> None:
        """Add a row's new owner to the plan, so that the runner gets the request in full."""
        assert request.row is not None, "a request without a row cannot be scheduled"
        self._new_rows.append(
            AdmittedRequest(
                row=request.row,
                request_id=request.id,
                token_ids=with_placeholders(request.token_ids, request.media),
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.params,
                stop_token_ids=tuple(sorted(request.stop_token_ids)),
                seed=seed,
                pooling=request.pooling,
                adapter=request.cache_key.adapter,
                adapter_slot=adapter_slot,
                media=request.media,
                state_slot=state_slot,
            )
        )

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step runs so far."""
        return sum(self._num_scheduled)

    def schedule(self, request: Request, num_tokens: int, first_page: int, new_pages: list[int]) -> None:
        """Run `num_tokens` tokens of a request; `new_pages` enter its page table from number `first_page` on."""
        assert 0 < num_tokens <= self.budget, "scheduling beyond the budget"
        row = request.row
        assert row is not None, "a request without a row cannot be scheduled"
        self.budget -= num_tokens
        self.requests.append(request)
        self._num_computed.append(request.num_computed_tokens)
        self._num_scheduled.append(num_tokens)
        num_samples = int(num_tokens == request.num_uncomputed_tokens)
        self._num_samples.append(num_samples)
        if new_pages:
            self._enter_pages(row, first_page, new_pages)
        request.num_computed_tokens += num_tokens
        request.num_pending_tokens += num_samples
        request.num_inflight_steps += 1
        request.wait_reason = ""

    def add_drafts(self, index: int, draft_ids: TokenArray, first_page: int, new_pages: list[int]) -> None:
        """Let the request at `index` of the batch, which samples, run draft tokens behind its last known token."""
        request, num_drafts = self.requests[index], len(draft_ids)
        assert self._num_samples[index] == 1, "drafts stand behind a token that samples"
        assert num_drafts <= self.budget, "drafts beyond the budget"
        assert request.row is not None, "a scheduled request has a row"
        self.budget -= num_drafts
        self._num_scheduled[index] += num_drafts
        self._num_samples[index] += num_drafts
        self._draft_ids.append(draft_ids)
        self._enter_pages(request.row, first_page, new_pages)
        request.num_computed_tokens += num_drafts
        request.num_pending_tokens += num_drafts
        request.has_drafts = True

    def _enter_pages(self, row: int, first_page: int, new_pages: list[int]) -> None:
        for number, page in enumerate(new_pages, first_page):
            self._page_rows.append(row)
            self._page_numbers.append(number)
            self._page_ids.append(page)

    def enter_windows(self, request: Request, windows: WindowPages) -> None:
        """Enter the window pages that a request's tokens need and were promised."""
        row = request.row
        assert row is not None, "a scheduled request has a row"
        first_page, pages = windows.cover(request.id, request.num_computed_tokens)
        if pages:
            self._window_entries += [(row, number, page) for number, page in enumerate(pages, first_page)]

    def build(
        self,
        transfers: PlanTransfers | None = None,
        encode: tuple[str, ...] = (),
        forget: tuple[str, ...] = (),
        states: PlanStates | None = None,
    ) -> StepPlan:
        """Freeze the plan. All arrays are int32; see `StepPlan` for their shapes."""
        return StepPlan(
            step=self.step,
            new_rows=tuple(self._new_rows),
            request_ids=tuple([request.id for request in self.requests]),
            rows=np.array([request.row for request in self.requests], dtype=np.int32),
            num_computed=np.array(self._num_computed, dtype=np.int32),
            num_scheduled=np.array(self._num_scheduled, dtype=np.int32),
            num_samples=np.array(self._num_samples, dtype=np.int32),
            page_rows=np.array(self._page_rows, dtype=np.int32),
            page_numbers=np.array(self._page_numbers, dtype=np.int32),
            page_ids=np.array(self._page_ids, dtype=np.int32),
            draft_ids=np.concatenate(self._draft_ids) if self._draft_ids else None,
            transfers=transfers,
            encode=encode,
            forget=forget,
            window_pages=_entries(self._window_entries) if self._window_entries else None,
            states=states,
        )


def _entries(entries: list[tuple[int, int, int]]) -> PageEntries:
    return PageEntries(*np.array(entries, dtype=np.int32).T.copy())


def request_seed(request: Request, engine_seed: int) -> int:
    """Return the seed of a request's draws: fixed at arrival, so that preemption and replay draw the same tokens.

    Returns:
        The client's seed, or one made from the engine's seed and the request's arrival; a signed 64-bit integer.
    """
    if request.params.seed is not None:
        return request.params.seed
    digest = blake2b(f"{engine_seed}/{request.arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
