"""`Resource`: a counted thing that requests hold while they run. `Resources`: all of a scheduler's, by hook.

The scheduler knows rows and pages, which every request holds, and everything else by these hooks alone. Each does
nothing until a resource overrides it. In the order in which a request meets them:

    it arrives               check
    it waits for its turn    reason_to_wait
    its turn has come        shorten, can_follow: behind which prefix it begins; limit: how far the step runs it
    it begins                acquire: all resources or none; row_fields
    a step runs it           limit, schedule; plan_fields
    a step is committed      committed, can_rewind; end_step
    its outcome is fixed     ended
    it leaves its row        release: it ended, or was preempted, and no launched step uses it any more
    an event from outside    apply

A resource decides by its arguments alone, never by a clock or a random number: a schedule is recorded and replayed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenmill.core.hooks import overriding
from tokenmill.core.plan import StepPlan
from tokenmill.core.request import Request
from tokenmill.core.transfers import TransferEvent
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.policies import View


class Resource:
    """The hooks of a resource. Those that return a reason return "" to agree."""

    def check(self, request: Request, num_tokens: int) -> None:
        """Refuse a request that could never run to `num_tokens` tokens.

        Raises:
            InvalidRequest: says what it needs, and what there is.
        """

    def begin_step(self, step: int, view: View) -> Iterable[Request]:
        """Prepare for scheduling a step; return the requests that must give up what they hold."""
        return ()

    def reason_to_wait(self, request: Request, step: int) -> str:
        """Return why a request without a row is passed over for now: others may begin before it."""
        return ""

    def shorten(self, request: Request, match: PrefixMatch, step: int) -> PrefixMatch:
        """Return the part of a cached prefix behind which the request can begin; `PageCopies` alone makes it longer."""
        return match

    def can_follow(self, request: Request, writer: Request, match: PrefixMatch) -> bool:
        """Return True if a request may wait for the pages that a running one is about to compute behind its match.

        That is where the writer leaves all that this request needs to begin behind those pages.
        """
        return True

    def limit(self, request: Request, start: int, num_tokens: int, match: PrefixMatch | None = None) -> tuple[int, str]:
        """Return how many of `num_tokens` tokens from `start` on a step can run, and why none if it is 0.

        Args:
            match: the prefix behind which a request without a row would begin.
        """
        return num_tokens, ""

    def acquire(self, request: Request, match: PrefixMatch, num_tokens: int, step: int) -> str:
        """Give a request what it holds while it has a row, or return why it must wait, and change nothing.

        Args:
            match: the prefix behind which it begins.
            num_tokens: tokens that it must have room for from the start.
        """
        return ""

    def row_fields(self, request: Request) -> Mapping[str, Any]:
        """Return what the plan says of a request that has got a row: fields of `AdmittedRequest`."""
        return {}

    def schedule(self, request: Request, start: int, num_tokens: int, step: int) -> None:
        """Take in that a step runs `num_tokens` tokens of a request from `start` on, as `limit` has allowed."""

    def plan_fields(self) -> Mapping[str, Any]:
        """Return the orders for the runner, each once: fields of `StepPlan`. A plan is made even for them alone."""
        return {}

    def committed(self, request: Request, end: int) -> None:
        """Take in the commit of a step that ran a request up to `end` tokens.

        Called only where that has filled a page or rejected drafts, or the request runs no longer.
        """

    def can_rewind(self, request: Request) -> bool:
        """Return False if a request has to begin anew when fewer of its tokens count than launched steps have run."""
        return True

    def end_step(self, step: int) -> None:
        """Take in that all of a step is committed, or that it has failed."""

    def ended(self, request: Request) -> None:
        """Take in that a request has ended. It may hold things until launched steps are committed, and come again."""

    def release(self, request: Request, step: int) -> None:
        """Take back all that a request holds, after `acquire`."""

    def apply(self, event: TransferEvent, step: int) -> None:
        """Apply an event from outside; ignore one that concerns other resources, or something that is over."""

    def counts(self) -> Mapping[str, Any]:
        """Return counters since the start, and the state now: fields of `EngineStats`."""
        return {}

    def check_invariants(self, owners: Sequence[Request], plans: Sequence[StepPlan]) -> None:
        """Raise AssertionError if something is lost or held twice. For tests.

        Args:
            owners: the requests that have a row. plans: of the launched steps, oldest first.
        """


class PageGroup(Resource, ABC):
    """Pages beside those of the full group, for layers that keep less: a request holds as many as its full pages say.

    Attributes:
        name: of such a page, for reasons.
    """

    name = ""

    @property
    @abstractmethod
    def num_left(self) -> int:
        """Number of pages that requests can still take."""

    @abstractmethod
    def num_wanted(self, num_pages: int) -> int:
        """Return how many pages of this group a request with `num_pages` full pages holds."""

    @abstractmethod
    def num_held(self, request: Request) -> int:
        """Return how many pages of this group a request holds; 0 without a row."""

    def resize(self, request: Request) -> None:
        """Take in that the number of a request's full pages has changed."""

    @abstractmethod
    def shortage(self, num_pages: int) -> str:
        """Return why a request with `num_pages` full pages must wait for pages of this group."""


class Resources:
    """The resources of a scheduler, in the order in which a request takes them; it gives them back in reverse.

    Attributes:
        check, begin_step, ...: for each hook the resources that override it, so that a model without any loops over
            nothing.
    """

    def __init__(self, resources: Iterable[Resource]) -> None:
        self.all = tuple(resources)
        self.check = overriding(self.all, Resource.check)
        self.begin_step = overriding(self.all, Resource.begin_step)
        self.reason_to_wait = overriding(self.all, Resource.reason_to_wait)
        self.shorten = overriding(self.all, Resource.shorten)
        self.can_follow = overriding(self.all, Resource.can_follow)
        self.limit = overriding(self.all, Resource.limit)
        self.acquire = overriding(self.all, Resource.acquire)
        self.row_fields = overriding(self.all, Resource.row_fields)
        self.schedule = overriding(self.all, Resource.schedule)
        self.plan_fields = overriding(self.all, Resource.plan_fields)
        self.committed = overriding(self.all, Resource.committed)
        self.can_rewind = overriding(self.all, Resource.can_rewind)
        self.end_step = overriding(self.all, Resource.end_step)
        self.ended = overriding(self.all, Resource.ended)
        self.release = overriding(self.all, Resource.release)[::-1]
        self.apply = overriding(self.all, Resource.apply)

    def check_all(self, request: Request, num_tokens: int) -> None:
        """Raise InvalidRequest for a request that could never run to `num_tokens` tokens."""
        for resource in self.check:
            resource.check(request, num_tokens)

    def acquire_all(self, request: Request, match: PrefixMatch, num_tokens: int, step: int) -> str:
        """Give a request all that it holds while it has a row, or nothing and return why; see `Resource.acquire`."""
        for number, resource in enumerate(self.acquire):
            if reason := resource.acquire(request, match, num_tokens, step):
                for taken in self.acquire[:number][::-1]:
                    taken.release(request, step)
                return reason
        return ""

    def release_all(self, request: Request, step: int) -> None:
        """Take back all that a request with a row holds."""
        for resource in self.release:
            resource.release(request, step)

    def matched(self, request: Request, match: PrefixMatch, step: int) -> PrefixMatch:
        """Return the part of a cached prefix behind which a request can begin with all that it holds."""
        for resource in self.shorten:
            match = resource.shorten(request, match, step)
        return match

    def can_follow_to(self, request: Request, writer: Request, match: PrefixMatch) -> bool:
        """Return True if a request may wait for the pages that `writer` computes; see `Resource.can_follow`."""
        return all(resource.can_follow(request, writer, match) for resource in self.can_follow)

    def reason_to_pass_over(self, request: Request, step: int) -> str:
        """Return why others may begin before a request without a row, or ""."""
        return next((reason for one in self.reason_to_wait if (reason := one.reason_to_wait(request, step))), "")
