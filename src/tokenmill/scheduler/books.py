"""`Books`: every request that is alive, its queue, its row, its pages, and the launched steps that pin them.

A launched step pins what it uses: ending or preempting a request only marks it, and its row and pages return when the
last launched step that uses them is committed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tokenmill.kv.kv_manager import KVManager
from tokenmill.request import FinishReason, Request, RequestStatus
from tokenmill.scheduler.plan import StepPlan
from tokenmill.scheduler.queue import QueuePolicy, RequestQueue
from tokenmill.scheduler.row_pool import RowPool

_READY = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})
_LEAVING = frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED})


@dataclass(slots=True)
class Group:
    """Requests that share a prompt. `has_prompt`: one of them has computed it."""

    members: list[Request] = field(default_factory=list)
    has_prompt: bool = False


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A plan whose outcome is not known yet, and the requests it pins."""

    plan: StepPlan
    requests: tuple[Request, ...]


class Books:
    """Moves requests between waiting, running, paused and gone."""

    def __init__(self, num_rows: int, policy: QueuePolicy, kv: KVManager) -> None:
        self.kv = kv
        self._policy = policy
        self.rows = RowPool(num_rows)
        self.waiting = RequestQueue(policy)
        self.running = RequestQueue(policy)
        self.launched: deque[LaunchedStep] = deque()
        self.requests: dict[str, Request] = {}
        self.groups: dict[str, Group] = {}
        self.step = 0
        self.num_preemptions = 0

    def enter(self, request: Request) -> None:
        """A request arrives."""
        assert request.id not in self.requests, f"request id {request.id} is in use"
        self.requests[request.id] = request
        self.waiting.add(request)
        if request.group:
            self.groups.setdefault(request.group, Group()).members.append(request)

    def start(self, request: Request) -> None:
        """A waiting request gets a row, unless it has kept one, and runs."""
        self.waiting.remove(request)
        self.running.add(request)
        request.move_to(RequestStatus.RUNNING)
        if request.row is None:
            request.row = self.rows.take()

    def preempt_last(self) -> Request:
        """Send the running request that yields first back to its place in the queue, to be recomputed later."""
        victim = self.running.last()
        self.running.remove(victim)
        victim.move_to(RequestStatus.PREEMPTED)
        victim.num_preemptions += 1
        victim.wait_reason = "was preempted: its pages were needed by a request before it"
        self.num_preemptions += 1
        self.waiting.add(victim)
        self.retire(victim)
        return victim

    def preempt_idle(self, but: Request | None = None) -> bool:
        """Take row and pages from a session between two turns. False if none but `but` has any.

        The victim, the last in policy order, keeps its place. Its next turn finds what the prefix cache has kept and
        recomputes the rest.
        """
        owners = [r for r in self.requests.values() if r.row is not None and not r.is_running and r is not but]
        idle = [request for request in owners if not request.num_inflight_steps]
        if not idle:
            return False
        victim = max(idle, key=self._policy)
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._release(victim)
        return True

    def end(self, request: Request, reason: FinishReason) -> None:
        """End a request wherever it is."""
        if not request.is_paused:
            self.queue_of(request).remove(request)
        request.finish(reason)
        self.retire(request)

    def queue_of(self, request: Request) -> RequestQueue:
        """The queue it stands in; paused and finished requests stand in none."""
        return self.running if request.is_running else self.waiting

    def retire(self, request: Request) -> None:
        """Take row and pages back from one that ended or was preempted, unless a launched step still uses them."""
        if request.num_inflight_steps or request.status not in _LEAVING:
            return
        self._release(request)
        if request.is_finished:
            self._forget(request)

    def num_returning_pages(self) -> int:
        """Pages of ended and preempted requests that return once the launched steps are committed."""
        leaving = {r.id: r for step in self.launched for r in step.requests if r.status in _LEAVING}
        return sum(len(self.kv.pages(request)) for request in leaving.values())

    def awaits_group(self, request: Request) -> bool:
        """True while the first of its group still computes the prompt that all of them will share."""
        if not request.group or request.num_prompt_tokens <= self.kv.page_size or not self.kv.shares_prefixes:
            return False
        group = self.groups[request.group]
        return not group.has_prompt and group.members[0] is not request

    def note_first_token(self, request: Request) -> None:
        """A request has computed its prompt; the others of its group will find it in the cache."""
        if request.group:
            self.groups[request.group].has_prompt = True

    def _release(self, request: Request) -> None:
        if request.row is not None:
            self.rows.give_back(request.row)
            self.kv.release(request, self.step)
            request.row = None
        request.num_computed_tokens = 0
        request.num_pending_tokens = 0

    def _forget(self, request: Request) -> None:
        del self.requests[request.id]
        if request.group:
            members = self.groups[request.group].members
            members.remove(request)
            if not members:
                del self.groups[request.group]

    def check_invariants(self) -> None:
        """Every owner's books agree; raises AssertionError where they do not. For tests: O(everything)."""
        self.kv.check_invariants()
        launched = [request for step in self.launched for request in step.requests]
        paused = [request for request in self.requests.values() if request.row is not None]
        owners = {r.id: r for r in [*self.running, *paused, *launched]}
        rows = [request.row for request in owners.values()]
        assert len(set(rows)) == len(rows) and None not in rows, "two requests own one row, or one owns none"
        assert len(rows) + self.rows.num_free == self.rows.num_rows, "a row is lost"
        for request in owners.values():
            assert request.num_inflight_steps == sum(r is request for r in launched), "in-flight steps are off"
            held = len(self.kv.pages(request)) * self.kv.page_size
            assert request.num_computed_tokens <= held, "a token without a page"
            assert request.num_tokens + request.num_pending_tokens <= request.max_tokens_total, "past its length"
        assert all(r.is_running for r in self.running), "a request in the running queue that does not run"
        assert not any(r.is_running or r.is_finished for r in self.waiting), "a waiting request that runs or ended"
        idle = [request for request in self.requests.values() if request.is_paused]
        known = {r.id for r in [*self.waiting, *idle, *owners.values()]}
        assert known == set(self.requests), "a request is lost"
        assert {r.id for group in self.groups.values() for r in group.members} <= known, "a group outlives its requests"


def is_ready(request: Request) -> bool:
    """False while a waiting request waits for something besides its turn: a grammar, remote KV."""
    return request.status in _READY
