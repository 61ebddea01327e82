"""Schedulers with one fault each: what `tokenmill.testing` must find."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import StepPlan, StepResult
from tokenmill.engine.scheduler.scheduler import Scheduler
from tokenmill.scheduling import PlanBuilder, Request, SimpleScheduler, most_tokens_held


class Plain(SimpleScheduler):
    """Everything in order, with the pages of its longest output from the start: without a fault."""

    def schedule(self) -> StepPlan | None:
        plan = self.begin_step()
        for request in self.running():
            self.advance(plan, request, self.config.max_num_batched_tokens)
        for request in self.waiting():
            if self.begin(plan, request, self.match(plan, request), plan.budget, most_tokens_held(request)):
                break
        return self.launch(plan)

    def running(self) -> Iterable[Request]:
        return list(self.state.running)

    def waiting(self) -> Iterable[Request]:
        return self.candidates()


class NewestFirst(Plain):
    """Serves the newest request first: the oldest starve in a flood."""

    def running(self) -> Iterable[Request]:
        return sorted(self.state.running, key=lambda request: -request.arrival)

    def waiting(self) -> Iterable[Request]:
        return sorted(self.candidates(), key=lambda request: -request.arrival)


class Forgetful(Plain):
    """A failed step answers only the requests of the oldest step."""

    def fail_in_flight(self, error: str) -> list[TokenOutput]:
        oldest = {request.id for request in self.in_flight[0].requests}
        return [output for output in super().fail_in_flight(error) if output.id in oldest]


class Twice(Plain):
    """An abort is answered twice where a launched step still runs the request."""

    def abort(self, ids: Iterable[str]) -> list[TokenOutput]:
        outputs = super().abort(ids)
        return outputs + [output for output in outputs if output.id in self.requests]


class Impatient(Plain):
    """An abort gives pages back at once, though a launched step still writes them."""

    def abort(self, ids: Iterable[str]) -> list[TokenOutput]:
        ids = list(ids)
        alive = [self.requests[one] for one in ids if one in self.requests]
        outputs = super().abort(ids)
        for request in alive:
            if request.num_inflight_steps and request.row is not None:
                held = self.kv._held[request.id]
                own = held.pages[held.num_tree_pages :]
                del held.pages[held.num_tree_pages :]
                self.kv.pool.free(own[::-1])
        return outputs


class Liar(Scheduler):
    """Says that the cache was reset, and keeps it."""

    def reset_prefix_cache(self, preempt_running: bool) -> bool:
        return super().reset_prefix_cache(preempt_running) or not self.in_flight


class Eager(Plain):
    """Samples a token at the end of every chunk."""

    def launch(self, builder: PlanBuilder) -> StepPlan | None:
        builder._num_samples = [1] * len(builder._num_samples)
        return super().launch(builder)


class Gambler(Plain):
    """Decides by chance."""

    def running(self) -> Iterable[Request]:
        return [request for request in self.state.running if random.random() < 0.8] or [*self.state.running]


class Idle(Plain):
    """Returns no plan in each third step, whatever waits."""

    num_calls = 0

    def schedule(self) -> StepPlan | None:
        self.num_calls += 1
        return None if self.num_calls % 3 == 0 and not self.in_flight else super().schedule()


class Leaking(Plain):
    """Keeps a page of each request that is aborted while it runs."""

    def abort(self, ids: Iterable[str]) -> list[TokenOutput]:
        for request in [self.requests[one] for one in ids if one in self.requests]:
            if request.row is not None and self.kv.pool.num_free:
                self.kv.pool.allocate(1)
        return super().abort(ids)


class Miscounting(Plain):
    """Its counts are not those of `EngineStats`."""

    def counts(self) -> dict[str, Any]:
        return super().counts() | {"num_smiles": 1}


class Swapping(Plain):
    """Gives the tokens of a step to each other's requests."""

    def commit(self, result: StepResult) -> list[TokenOutput]:
        outputs = super().commit(result)
        if len(outputs) == 2:
            first, second = outputs
            first.token_ids, second.token_ids = second.token_ids, first.token_ids
        return outputs


FAULTY = {
    NewestFirst: "starves",
    Forgetful: "was not answered",
    Twice: "answered after its end",
    Impatient: "page",
    Liar: "its pages should say",
    Eager: "samples 1 tokens, and should 0",
    Gambler: "another plan",
    Idle: "nothing runs, though",
    Leaking: "page",
    Miscounting: "num_smiles",
    Swapping: "its pages should say",
}
