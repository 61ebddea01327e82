"""A scheduler from nothing: `SchedulerInterface` without `SchedulerBase`; one request at a time, one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import AdmittedRequest
from tokenmill.core.request import RequestStatus
from tokenmill.engine.scheduler.plan_builder import request_seed
from tokenmill.scheduling import (
    FinishReason,
    InFlightStep,
    KVManager,
    Request,
    SchedulerConfig,
    SchedulerInterface,
    StepPlan,
    StepResult,
)


class OneAtATime(SchedulerInterface[KVManager]):
    """Runs the first request to its end, in the row 0."""

    def __init__(
        self, config: SchedulerConfig, kv: KVManager, resources: Iterable[Any], drafters: Iterable[Any]
    ) -> None:
        self._config, self.kv = config, kv
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[InFlightStep] = deque()
        self._step = 0

    @property
    def config(self) -> SchedulerConfig:
        return self._config

    @property
    def requests(self) -> Mapping[str, Request]:
        return self._requests

    @property
    def in_flight(self) -> deque[InFlightStep]:
        return self._in_flight

    @property
    def step(self) -> int:
        return self._step

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        if request.id in self._requests:
            raise InvalidRequest(f"the request id {request.id} is in use")
        self.kv.check_size(request.max_tokens_total)
        self._requests[request.id] = request

    def abort(self, ids: Iterable[str]) -> list[TokenOutput]:
        alive = [self._requests[one] for one in ids if one in self._requests and not self._requests[one].is_finished]
        return [self._end(request, FinishReason.ABORT) for request in alive]

    def schedule(self) -> StepPlan | None:
        request = next(iter(self._requests.values()), None)
        if request is None or self._in_flight:
            return None
        self._step += 1
        new_rows = () if request.is_running else (self._begin(request),)
        start = request.num_computed_tokens
        count = min(request.num_tokens - start, self._config.largest_chunk)
        request.num_computed_tokens += count
        samples = int(request.num_computed_tokens == request.num_tokens)
        request.num_pending_tokens += samples
        pages = self.kv.pages(request) if new_rows else []
        plan = StepPlan(
            self._step,
            new_rows,
            (request.id,),
            rows=_array([0]),
            num_computed=_array([start]),
            num_scheduled=_array([count]),
            num_samples=_array([samples]),
            page_rows=_array([0] * len(pages)),
            page_numbers=_array(range(len(pages))),
            page_ids=_array(pages),
        )
        self._in_flight.append(InFlightStep(plan, (request,)))
        return plan

    def _begin(self, request: Request) -> AdmittedRequest:
        match = self.kv.match(request, self._step)
        assert self.kv.acquire(request, match, request.max_tokens_total, self._step, 0), "no other request holds pages"
        request.num_computed_tokens = match.num_tokens
        request.move_to(RequestStatus.RUNNING)
        request.row = 0
        seed, stops = request_seed(request, self._config.seed), tuple(sorted(request.stop_token_ids))
        size = request.num_prompt_tokens
        return AdmittedRequest(0, request.id, request.token_ids.copy(), size, request.params, stops, seed)

    def commit(self, result: StepResult) -> list[TokenOutput]:
        (request,) = self._in_flight.popleft().requests
        if request.is_finished:
            self._leave(request)
            return []
        self.kv.cache_full_pages(request, request.num_computed_tokens, result.step)
        tokens = result.token_ids.tolist()
        if not tokens:
            return []
        tokens = request.append_outputs(tokens)
        if request.is_finished:
            self._leave(request)
        return [TokenOutput(request.id, tokens, request.finish_reason, request.stop_reason, request.num_cached_tokens)]

    def fail_in_flight(self, error: str) -> list[TokenOutput]:
        outputs = []
        while self._in_flight:
            (request,) = self._in_flight.popleft().requests
            if not request.is_finished:
                outputs.append(self._end(request, FinishReason.ERROR, error))
            else:
                self._leave(request)
        return outputs

    def reset_prefix_cache(self, preempt_running: bool) -> bool:
        running = [request for request in self._requests.values() if request.is_running]
        if preempt_running and not self._in_flight:
            for request in running:
                self.kv.release(request, self._step)
                request.move_to(RequestStatus.PREEMPTED)
                request.row, request.num_computed_tokens = None, 0
        return self.kv.clear_cache()

    def counts(self) -> dict[str, Any]:
        num_running = sum(request.is_running for request in self._requests.values())
        return {
            "step": self._step,
            "num_running": num_running,
            "num_waiting": len(self._requests) - num_running,
            "num_rows_used": num_running,
            "num_pages": self.kv.pool.num_usable,
            "num_pages_pinned": self.kv.num_pinned,
            "num_pages_evictable": self.kv.cache.num_evictable,
            "num_preemptions": 0,
            "prefix_queries": self.kv.num_queried_tokens,
            "prefix_hits": self.kv.num_hit_tokens,
        }

    def _end(self, request: Request, reason: FinishReason, error: str = "") -> TokenOutput:
        request.finish(reason)
        if not self._in_flight or self._in_flight[0].requests[0] is not request:
            self._leave(request)
        return TokenOutput(request.id, [], reason, error=error or None)

    def _leave(self, request: Request) -> None:
        del self._requests[request.id]
        if request.row is not None:
            self.kv.release(request, self._step)
            request.row = None


def _array(values: Iterable[int]) -> np.ndarray:
    return np.array([*values], dtype=np.int32)
