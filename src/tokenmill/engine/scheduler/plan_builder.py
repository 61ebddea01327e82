"""`PlanBuilder`: collect what a step will run while the scheduler decides, then freeze it into a `StepPlan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from tokenmill.core.media import with_placeholders
from tokenmill.core.plan import AdmittedRequest, StepPlan
from tokenmill.core.request import Request, TokenArray
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.resources.resource import Resources


class PlanBuilder:
    """Plan of one step in the making.

    Attributes:
        config: limits of every step.
        budget: tokens that the step can still run.
        requests: those that it runs, in batch order.
    """

    def __init__(self, config: SchedulerConfig, step: int, resources: Resources) -> None:
        self.step = step
        self.budget = config.max_num_batched_tokens
        self.requests: list[Request] = []
        self.config = config
        self._resources = resources
        self._new_rows: list[AdmittedRequest] = []
        self._num_computed: list[int] = []
        self._num_scheduled: list[int] = []
        self._num_samples: list[int] = []
        self._draft_ids: list[TokenArray] = []
        self._page_rows: list[int] = []
        self._page_numbers: list[int] = []
        self._page_ids: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step runs so far."""
        return sum(self._num_scheduled)

    def chunk(self, request: Request, start: int, match: PrefixMatch | None = None) -> tuple[int, str]:
        """Return how many tokens of a request the step can run from `start` on, and why none if it is 0.

        Args:
            match: the prefix behind which a request without a row would begin.
        """
        remaining = request.num_tokens + request.num_pending_tokens - start
        num_tokens = min(remaining, self.config.largest_chunk, self.budget)
        for resource in self._resources.limit:
            num_tokens, reason = resource.limit(request, start, num_tokens, match)
            if not num_tokens:
                return 0, reason
        return num_tokens, ""

    def add_row(self, request: Request) -> None:
        """Add a row's new owner to the plan, so that the runner gets the request in full."""
        assert request.row is not None, "a request without a row cannot be scheduled"
        fields = {key: one for r in self._resources.row_fields for key, one in r.row_fields(request).items()}
        self._new_rows.append(
            AdmittedRequest(
                row=request.row,
                request_id=request.id,
                token_ids=with_placeholders(request.token_ids, request.media),
                num_prompt_tokens=request.num_prompt_tokens,
                params=request.params,
                stop_token_ids=tuple(sorted(request.stop_token_ids)),
                seed=request_seed(request, self.config.seed),
                pooling=request.pooling,
                adapter=request.cache_key.adapter,
                media=request.media,
                **fields,
            )
        )

    def schedule(self, request: Request, num_tokens: int, first_page: int = 0, new_pages: Sequence[int] = ()) -> None:
        """Run `num_tokens` tokens of a request; `new_pages` enter its page table from number `first_page` on."""
        assert 0 < num_tokens <= self.budget, "scheduling beyond the budget"
        start = request.num_computed_tokens
        for resource in self._resources.schedule:
            resource.schedule(request, start, num_tokens, self.step)
        if new_pages:
            self._enter_pages(request, first_page, new_pages)
        end = start + num_tokens
        num_samples = int(end == request.num_tokens + request.num_pending_tokens and not request.pooling)
        self.budget -= num_tokens
        self.requests.append(request)
        self._num_computed.append(start)
        self._num_scheduled.append(num_tokens)
        self._num_samples.append(num_samples)
        request.num_computed_tokens = end
        request.num_pending_tokens += num_samples
        request.num_inflight_steps += 1
        request.wait_reason = ""

    def add_drafts(self, index: int, draft_ids: TokenArray, first_page: int, new_pages: list[int]) -> None:
        """Let the request at `index` of the batch, which samples, run draft tokens behind its last known token."""
        request, num_drafts = self.requests[index], len(draft_ids)
        assert self._num_samples[index] == 1, "drafts stand behind a token that samples"
        assert num_drafts <= self.budget, "drafts beyond the budget"
        request.has_drafts = True
        for resource in self._resources.schedule:
            resource.schedule(request, request.num_computed_tokens, num_drafts, self.step)
        self.budget -= num_drafts
        self._num_scheduled[index] += num_drafts
        self._num_samples[index] += num_drafts
        self._draft_ids.append(draft_ids)
        self._enter_pages(request, first_page, new_pages)
        request.num_computed_tokens += num_drafts
        request.num_pending_tokens += num_drafts

    def _enter_pages(self, request: Request, first_page: int, new_pages: Sequence[int]) -> None:
        row = request.row
        assert row is not None, "a request without a row cannot be scheduled"
        for number, page in enumerate(new_pages, first_page):
            self._page_rows.append(row)
            self._page_numbers.append(number)
            self._page_ids.append(page)

    def build(self) -> StepPlan | None:
        """Freeze the plan; None if there is nothing to run and no order. All arrays are int32; see `StepPlan`."""
        orders: Mapping[str, Any] = {
            key: one for r in self._resources.plan_fields for key, one in r.plan_fields().items()
        }
        if not self.requests and not orders:
            return None
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
            **orders,
        )


def request_seed(request: Request, engine_seed: int) -> int:
    """Return the seed of a request's draws: fixed at arrival, so that preemption and replay draw the same tokens.

    Returns:
        The client's seed, or one made from the engine's seed and the request's arrival; a signed 64-bit integer.
    """
    if request.params.seed is not None:
        return request.params.seed
    digest = blake2b(f"{engine_seed}/{request.arrival}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
