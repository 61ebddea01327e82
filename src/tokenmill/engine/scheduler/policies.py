"""The policies of a scheduler, all in one place: the order of requests and which one yields, what an admitted request
takes at once, and which requests may share a step.

Each kind has a base class with our policies below it; those of eviction are in `tokenmill.engine.kv.eviction`. A policy
of your own derives from the same class and need not be here: `--scheduling-policy`, `--batch-policy`, `--admission` and
`--eviction-policy` (and the keyword arguments of `LLM`) take the name of an entry point of the group
`tokenmill.policies`, or `module:name`. It must decide by its arguments alone, never by a clock or a random number: a
schedule is recorded and replayed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

from tokenmill.config.engine_settings import POLICY_PLUGINS
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.plugins import find_plugin
from tokenmill.core.request import Request
from tokenmill.engine.kv.eviction import EvictionPolicy


class View(Protocol):
    """Read-only view of the scheduler for policies and resources: rows, pages and both queues, as they are now."""

    @property
    def waiting(self) -> Sequence[Request]:
        """Waiting requests, in order; also those that wait for something besides their turn."""

    @property
    def running(self) -> Sequence[Request]:
        """Requests that own a row and make progress, in order."""

    @property
    def is_idle(self) -> bool:
        """True while no request runs and no step is launched."""

    @property
    def num_free_rows(self) -> int:
        """Number of rows that can be taken now."""

    @property
    def num_available_pages(self) -> int:
        """Number of pages that can be taken now: free ones, and those that only the prefix cache holds."""

    @property
    def num_pages(self) -> int:
        """Number of all pages."""

    @property
    def page_size(self) -> int:
        """Number of tokens in a page."""


class QueuePolicy:
    """The order of waiting and running requests, and the choice of a victim when pages run out.

    Attributes:
        by_tenant: among requests of equal `rank`, tenants take turns, round by round (`fairness.py`).
    """

    by_tenant = False

    def rank(self, request: Request) -> Any:
        """Return a sortable rank: lower ranks come first, equal ranks in order of arrival."""
        return 0

    def changed(self, view: View, step: int) -> Iterable[Request]:
        """Return, before each step, the requests whose rank has changed, as by aging."""
        return ()

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        """Choose the request to preempt from these running requests, in order, which are not in the step yet."""
        return candidates[-1]


class Fair(QueuePolicy):
    """Tenants take turns; the default. See `fairness.py`."""

    by_tenant = True


class FirstComeFirstServed(QueuePolicy):
    """Order of arrival, regardless of the tenant (vLLM's `fcfs`)."""


class ByPriority(QueuePolicy):
    """Lower priority numbers first; among equals, tenants take turns."""

    by_tenant = True

    def rank(self, request: Request) -> int:
        """Return the client's priority number."""
        return request.priority


class AdmissionPolicy(ABC):
    """Decides how many tokens' pages a request must get at its admission; it waits until they are there.

    Attributes:
        is_promise: an admitted request keeps its pages through other tenants' turns.
    """

    is_promise = False

    @abstractmethod
    def num_tokens_to_hold(self, request: Request, end: int, view: View) -> int:
        """Return the tokens that its pages must have room for, at least `end`: its tokens after its first chunk."""

    def reason_to_wait(self, request: Request, view: View) -> str:
        """Return why a request and all after it must wait though rows and pages are there; "" admits it."""
        return ""


class WholePrompt(AdmissionPolicy):
    """Holds all tokens it has: a prompt that begins is not given up half-way for lack of pages. The default.

    As vLLM's `scheduler_reserve_full_isl`, but the pages are taken, not only counted.
    """

    def num_tokens_to_hold(self, request: Request, end: int, view: View) -> int:
        """Return the number of the request's tokens so far."""
        return request.num_tokens


class Optimistic(AdmissionPolicy):
    """Holds only the tokens it runs now, so that a prompt may begin where only a part of it fits."""

    def num_tokens_to_hold(self, request: Request, end: int, view: View) -> int:
        """Return the number of tokens computed after its first chunk."""
        return end


class Reserve(AdmissionPolicy):
    """Holds its longest possible output: fewer requests run, and no running request is ever preempted."""

    is_promise = True

    def num_tokens_to_hold(self, request: Request, end: int, view: View) -> int:
        """Return the number of tokens of prompt and longest output."""
        return most_tokens_held(request)


def most_tokens_held(request: Request) -> int:
    """Return the most tokens whose KV a request may need: prompt and output, or the prompt alone for one output token.

    That output token is never run, and the prompt may be as long as the context.
    """
    brings_one = request.max_tokens_total == request.num_prompt_tokens + 1
    return request.max_tokens_total - brings_one


class Step(Protocol):
    """A step in the making, implemented by `SchedulePass`."""

    @property
    def is_empty(self) -> bool:
        """True while nothing is scheduled."""

    @property
    def is_for_decodes(self) -> bool:
        """True if a decode should not wait for prompts in this step: that of the oldest request has waited."""

    def advance(self, which: Callable[[Request], bool] | None = None, lets_in: bool = True) -> bool:
        """Schedule running requests, all or some. Return True if none was short of pages: only then may others enter.

        Args:
            lets_in: where tenants take turns, a waiting request enters before a running one that comes after it.
        """

    def admit(self, which: Callable[[Request], bool] | None = None, limit: int | None = None) -> None:
        """Admit waiting requests in order, all or some and at most `limit`, until budget, rows or pages end."""


class BatchPolicy(ABC):
    """Decides which requests may share a step.

    No request should enter a step in which a running one was short of pages, unless the step would be empty: the last
    request running may have preempted itself, to find in the cache what it held twice.
    """

    @abstractmethod
    def fill(self, step: Step) -> None:
        """Fill a step from running and waiting requests."""


class Mixed(BatchPolicy):
    """Prompts and decodes share steps (vLLM V1): running requests first, then as many new ones as fit. The default."""

    def fill(self, step: Step) -> None:
        """Schedule running requests, then admit new ones unless pages ran short."""
        if step.advance() or step.is_empty:
            step.admit()


class DecodeFirst(BatchPolicy):
    """Puts every decode into each step, and prompts into what they leave: texts go on evenly, prompts wait for it."""

    def fill(self, step: Step) -> None:
        """Schedule decodes, then prompts; admit new ones unless pages ran short."""
        has_pages = step.advance(lambda request: not request.is_prefilling, lets_in=False)
        has_pages &= step.advance(lambda request: request.is_prefilling)
        if has_pages or step.is_empty:
            step.admit()


class PrefillFirst(BatchPolicy):
    """Fills a step with prompts, else with decodes (Mini-SGLang): new requests start soonest, decodes wait for them."""

    def fill(self, step: Step) -> None:
        """Schedule and admit prompts; if there are none, schedule decodes."""
        if not step.is_for_decodes and step.advance(lambda request: request.is_prefilling):
            step.admit()
        if step.is_empty:
            step.advance(lambda request: not request.is_prefilling, lets_in=False)
        if step.is_empty:
            step.admit()


QUEUE_POLICIES: dict[str, type[QueuePolicy]] = {"fair": Fair, "fcfs": FirstComeFirstServed, "priority": ByPriority}
ADMISSION_POLICIES: dict[str, type[AdmissionPolicy]] = {
    "whole-prompt": WholePrompt,
    "optimistic": Optimistic,
    "reserve": Reserve,
}
BATCH_POLICIES: dict[str, type[BatchPolicy]] = {
    "mixed": Mixed,
    "decode-first": DecodeFirst,
    "prefill-first": PrefillFirst,
}

Policy = TypeVar("Policy", QueuePolicy, AdmissionPolicy, BatchPolicy, EvictionPolicy)


def find_policy(flag: str, name: str, known: dict[str, type[Policy]], kind: type[Any]) -> Policy:
    """Find a policy by the name of a built-in one or an entry point, or by `module:name`.

    Args:
        flag: the setting that the name comes from, for errors.
        known: built-in policies.
        kind: their base class.

    Raises:
        InvalidConfig: no policy has that name, its module cannot be imported, or it is of another kind.
    """
    if name in known:
        return known[name]()
    found = find_plugin(flag, POLICY_PLUGINS, name)
    if found is None:
        raise InvalidConfig(
            f"{flag} must be one of {', '.join(known)}, an entry point of {POLICY_PLUGINS} or module:name, got {name!r}"
        )
    policy = found() if isinstance(found, type) else found
    if not isinstance(policy, kind):
        raise InvalidConfig(f"{flag} {name}: is not a {kind.__name__} (tokenmill.plugins)")
    return cast(Policy, policy)
