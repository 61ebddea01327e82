"""The policies of a scheduler, all in one place: who comes first and who yields, what an admitted request takes at
once, what may share a step.

Each kind has a base class with our policies below it. One of your own derives from the same class and need not be
here: `--scheduling-policy`, `--batch-policy` and `--admission` (and the keyword arguments of `LLM`) take the name of an
entry point of the group `tokenmill.policies`, or `module:name`. It must decide by what it is shown alone, never by a
clock or a random number: a schedule is recorded and replayed.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar, cast

from tokenmill.config.configs import POLICY_PLUGINS
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.request import Request


class View(Protocol):
    """What a policy may look at: rows, pages and both queues, as they are now."""

    @property
    def waiting(self) -> Sequence[Request]:
        """Waiting requests, in order; also those that wait for something besides their turn."""

    @property
    def running(self) -> Sequence[Request]:
        """Requests that own a row and make progress, in order."""

    @property
    def num_free_rows(self) -> int:
        """Rows that can be taken now."""

    @property
    def num_available_pages(self) -> int:
        """Pages that can be taken now: free ones, and those that only the prefix cache holds."""

    @property
    def num_pages(self) -> int:
        """All pages."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""


class QueuePolicy:
    """The order of requests, waiting and running, and who yields when pages run out.

    Attributes:
        by_tenant: among those of equal `rank`, tenants take turns, round by round (`fairness.py`).
    """

    by_tenant = False

    def rank(self, request: Request) -> Any:
        """Requests of a lower rank come first, those of equal rank in order of arrival. Any type that has an order."""
        return 0

    def changed(self, view: View, step: int) -> Iterable[Request]:
        """Called before each step: the requests whose rank is not what it was. Aging is an example."""
        return ()

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        """Who of these running requests, in order, is preempted. They are those not yet part of the step."""
        return candidates[-1]


class Fair(QueuePolicy):
    """Tenants take turns; see `fairness.py`. The default."""

    by_tenant = True


class FirstComeFirstServed(QueuePolicy):
    """Order of arrival, whoever asks (vLLM's `fcfs`)."""


class ByPriority(QueuePolicy):
    """A lower priority number first; among equals, tenants take turns."""

    by_tenant = True

    def rank(self, request: Request) -> int:
        """The client's number."""
        return request.priority


class AdmissionPolicy(ABC):
    """What an admitted request takes at once. It waits until that is there.

    Attributes:
        is_promise: what an admitted request has taken is not taken back in another tenant's turn.
    """

    is_promise = False

    @abstractmethod
    def num_tokens_to_hold(self, request: Request, end: int, view: View) -> int:
        """Tokens that its pages must have room for, at least `end`: those that it has when its first chunk has run."""

    def reason_to_wait(self, request: Request, view: View) -> str:
        """Why it is not admitted yet, though rows and pages are there, nor anybody after it; "": it is."""
        return ""


class WholePrompt(AdmissionPolicy):
    """All tokens it has: a prompt that begins is not given up half-way for lack of its own pages. The default.

    As vLLM's `scheduler_reserve_full_isl`, but the pages are taken, not only counted.
    """

    def num_tokens_to_hold(self, request: Request, end: int, view: View) -> int:
        """Its tokens so far."""
        return request.num_tokens


class Optimistic(AdmissionPolicy):
    """Only the tokens it runs now: a prompt begins where less than all of it fits."""

    def num_tokens_to_hold(self, request: Request, end: int, view: View) -> int:
        """As many as run."""
        return end


class Reserve(AdmissionPolicy):
    """Its longest possible output: fewer requests run, and none that runs is ever preempted."""

    is_promise = True

    def num_tokens_to_hold(self, request: Request, end: int, view: View) -> int:
        """Prompt and output."""
        return most_tokens_held(request)


def most_tokens_held(request: Request) -> int:
    """Tokens whose KV it may need: prompt and output, or the prompt alone where it brings a single token.

    That one is never run, and the prompt may be as long as the context.
    """
    brings_one = request.max_tokens_total == request.num_prompt_tokens + 1
    return request.max_tokens_total - brings_one


class Step(Protocol):
    """A step in the making; `SchedulePass`."""

    @property
    def is_empty(self) -> bool:
        """True while nothing is scheduled."""

    @property
    def is_for_decodes(self) -> bool:
        """True if a decode should not have to wait for prompts in this step: that of the oldest request has waited."""

    def advance(self, which: Callable[[Request], bool] | None = None, lets_in: bool = True) -> bool:
        """Schedule running requests, all or some; True if none was short of pages: only then may others enter.

        Args:
            lets_in: where tenants take turns, a waiting request enters before a running one that comes after it.
        """

    def admit(self, which: Callable[[Request], bool] | None = None, limit: int | None = None) -> None:
        """Admit waiting requests in order, all or some and at most `limit`, until budget, rows or pages end."""


class BatchPolicy(ABC):
    """What may share a step.

    Nobody should enter a step in which a running request was short of pages, unless the step would be empty: the last
    request running may have preempted itself, to find in the cache what it held twice.
    """

    @abstractmethod
    def fill(self, step: Step) -> None:
        """Fill a step from running and waiting requests."""


class Mixed(BatchPolicy):
    """Prompts and decodes share steps (vLLM V1): running requests first, then as many new ones as fit. The default."""

    def fill(self, step: Step) -> None:
        """See `BatchPolicy`."""
        if step.advance() or step.is_empty:
            step.admit()


class PrefillFirst(BatchPolicy):
    """A step is all prompts, else all decodes (Mini-SGLang): new requests start soonest, decodes wait for them."""

    def fill(self, step: Step) -> None:
        """See `BatchPolicy`."""
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
BATCH_POLICIES: dict[str, type[BatchPolicy]] = {"mixed": Mixed, "prefill-first": PrefillFirst}

Policy = TypeVar("Policy", QueuePolicy, AdmissionPolicy, BatchPolicy)


def find_policy(flag: str, name: str, known: dict[str, type[Policy]], kind: type[Any]) -> Policy:
    """A policy by the name of one of ours, of an entry point, or by `module:name`.

    Args:
        flag: the setting that the name comes from, for errors.
        known: ours.
        kind: their base class.

    Raises:
        InvalidConfig: there is none of that name, its module cannot be imported, or it is no policy of this kind.
    """
    if name in known:
        return known[name]()
    try:
        found = _load(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidConfig(f"{flag} {name}: cannot be imported: {error}; is its folder on PYTHONPATH?") from error
    if found is None:
        raise InvalidConfig(
            f"{flag} must be one of {', '.join(known)}, an entry point of {POLICY_PLUGINS} or module:name, got {name!r}"
        )
    policy = found() if isinstance(found, type) else found
    if not isinstance(policy, kind):
        raise InvalidConfig(f"{flag} {name}: is no {kind.__name__} (tokenmill.engine.scheduler.policies)")
    return cast(Policy, policy)


def _load(name: str) -> Any:
    for entry in entry_points(group=POLICY_PLUGINS, name=name):
        return entry.load()
    if ":" not in name:
        return None
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
