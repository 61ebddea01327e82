"""`PlanBuilder`: collects what a step will run while the scheduler decides, then freezes it into a `StepPlan`."""

from __future__ import annotations

import numpy as np

from tokenmill.request import Request
from tokenmill.scheduler.plan import NewRow, StepPlan


class PlanBuilder:
    """The plan of one step in the making. Keeps the token budget."""

    def __init__(self, step: int, budget: int) -> None:
        self.step = step
        self.budget = budget
        self.requests: list[Request] = []
        self._new_rows: list[NewRow] = []
        self._num_computed: list[int] = []
        self._num_scheduled: list[int] = []
        self._samples: list[bool] = []
        self._page_rows: list[int] = []
        self._page_numbers: list[int] = []
        self._page_ids: list[int] = []

    def add_row(self, request: Request, seed: int) -> None:
        """The request takes a row in this step: the runner gets it in full."""
        assert request.row is not None, "a request without a row cannot be scheduled"
        self._new_rows.append(
            NewRow(
                row=request.row,
                request_id=request.id,
                token_ids=request.token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.params,
                stop_token_ids=tuple(sorted(request.stop_token_ids)),
                seed=seed,
                pooling=request.pooling,
            )
        )

    def schedule(self, request: Request, num_tokens: int, first_page: int, new_pages: list[int]) -> None:
        """Run `num_tokens` tokens of a request; `new_pages` stand in its page table from number `first_page` on."""
        assert 0 < num_tokens <= self.budget, "scheduling beyond the budget"
        row = request.row
        assert row is not None, "a request without a row cannot be scheduled"
        self.budget -= num_tokens
        self.requests.append(request)
        self._num_computed.append(request.num_computed_tokens)
        self._num_scheduled.append(num_tokens)
        samples = num_tokens == request.num_uncomputed_tokens
        self._samples.append(samples)
        for number, page in enumerate(new_pages, first_page):
            self._page_rows.append(row)
            self._page_numbers.append(number)
            self._page_ids.append(page)
        request.num_computed_tokens += num_tokens
        request.num_pending_tokens += samples
        request.num_inflight_steps += 1
        request.wait_reason = ""

    def build(self) -> StepPlan:
        """Freeze. All arrays are int32; see `StepPlan` for their shapes."""
        return StepPlan(
            step=self.step,
            new_rows=tuple(self._new_rows),
            request_ids=tuple([request.id for request in self.requests]),
            rows=np.array([request.row for request in self.requests], dtype=np.int32),
            num_computed=np.array(self._num_computed, dtype=np.int32),
            num_scheduled=np.array(self._num_scheduled, dtype=np.int32),
            samples=np.array(self._samples, dtype=np.bool_),
            page_rows=np.array(self._page_rows, dtype=np.int32),
            page_numbers=np.array(self._page_numbers, dtype=np.int32),
            page_ids=np.array(self._page_ids, dtype=np.int32),
        )
