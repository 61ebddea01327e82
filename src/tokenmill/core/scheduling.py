"""`SchedulerInterface`: all that an engine asks of its scheduler; ours and those of `--scheduler-cls`.

    add, abort ─> schedule: a plan, launched ─> commit: its outcome, or fail_in_flight

An engine calls everything in one thread. Up to `depth` steps may be launched before the first is committed; a scheduler
that wants one at a time returns no plan meanwhile. What it decides must follow from these calls alone, never from a
clock or a draw: a schedule is recorded and replayed. Methods that are not abstract serve a `Feature`, or tell more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.plan import StepOutcome, StepPlan, StepResult
from tokenmill.core.request import Request, TurnInput
from tokenmill.core.transfers import KVQuery, TransferEvent

# The keeper of pages, which stands above this module.
KV = TypeVar("KV")
Kind = TypeVar("Kind")


class Feature(StrEnum):
    """A feature that a scheduler need not serve. Flags and requests that need one it lacks are refused by name.

    Attributes:
        ORDER: `--scheduling-policy`. BATCHES: `--batch-policy` and `--admission`.
        WHOLE_PROMPTS: `--no-enable-chunked-prefill`. STAGES: `--pipeline-parallel-size`.
        DRAFTS: it asks its drafter. TRANSFERS: `take_queries`, `apply_transfer_event`; waiting requests fetch KV.
        STATES: models with recurrent states. WINDOWS: layers with a window give up pages; without it these are kept.
        ADAPTERS, IMAGES: requests that have some.
        GRAMMARS: `wake`; a request whose mask was late (`mask_missed`) is not run until its steps are committed.
        SESSIONS: `extend`, `begin_turns`; a waiting request may have kept its row.
        BACKGROUND: requests that come after all others and yield to them.
        REPORTS: log probabilities of prompts, and vectors.
    """

    ORDER = "an order of requests"
    BATCHES = "policies of batches and admission"
    WHOLE_PROMPTS = "prompts in one step"
    STAGES = "pipeline stages"
    DRAFTS = "speculation"
    TRANSFERS = "KV transfer"
    STATES = "recurrent states"
    WINDOWS = "sliding windows"
    ADAPTERS = "adapters"
    IMAGES = "images"
    GRAMMARS = "grammars"
    SESSIONS = "sessions"
    BACKGROUND = "background requests"
    REPORTS = "prompt log probabilities and embeddings"


_ASKS: dict[Feature, Callable[[AddRequest], object]] = {
    Feature.ADAPTERS: lambda message: message.adapter,
    Feature.IMAGES: lambda message: message.media,
    Feature.GRAMMARS: lambda message: message.params.grammar,
    Feature.SESSIONS: lambda message: message.is_resumable,
    Feature.BACKGROUND: lambda message: message.is_background,
    Feature.REPORTS: lambda message: message.pooling is not None or message.params.prompt_logprobs is not None,
}


def check_served(message: AddRequest, missing: Collection[Feature], scheduler: type) -> None:
    """Refuse a request that needs a feature which a scheduler is missing.

    Raises:
        InvalidRequest: names the feature and the scheduler.
    """
    for feature in Feature:
        if feature in missing and feature in _ASKS and _ASKS[feature](message):
            raise InvalidRequest(f"the scheduler of this engine, {scheduler.__name__}, does not serve {feature}")


@dataclass(slots=True)
class InFlightStep:
    """A launched step that is not committed yet.

    Attributes:
        requests: the requests that it pins, in batch order.
        outcome: its outcome; None until an executor has launched it.
    """

    plan: StepPlan
    requests: tuple[Request, ...]
    outcome: StepOutcome | None = None

    def result(self) -> StepResult:
        """Wait for the outcome and return it. Raises what the step raised."""
        assert self.outcome is not None, f"step {self.plan.step} was given to no executor"
        return self.outcome.result()


class Limits(Protocol):
    """The limits of a scheduler that its engine has to know; `SchedulerConfig` has all."""

    @property
    def max_num_seqs(self) -> int:
        """Most requests that run at the same time."""

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens of a step."""

    @property
    def max_loras(self) -> int:
        """Most adapters in a step; 0: none."""


class SchedulerInterface(ABC, Generic[KV]):
    """Holds all requests between their arrival and their last output.

    Attributes:
        serves: features that it has; flags and requests that need others are refused.
        config, kv: as given.
    """

    serves: ClassVar[frozenset[Feature]] = frozenset()
    config: Limits
    kv: KV

    @abstractmethod
    def __init__(self, config: Any, kv: KV, resources: Iterable[Any], drafters: Sequence[Any]) -> None:
        """
        Args:
            config: a `SchedulerConfig`. kv: the keeper of all pages, a `KVManager`; nothing else hands out pages.
            resources: what requests hold besides rows and pages, in the order in which they take it: for its features.
            drafters: none, or one `Drafter` that proposes tokens which decodes may run ahead.

        Raises:
            InvalidConfig: nothing could run with these limits.
        """

    # --- every scheduler --------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def requests(self) -> Mapping[str, Request]:
        """All live requests by id, with those that have ended while a launched step still uses their rows."""

    @property
    @abstractmethod
    def in_flight(self) -> Sequence[InFlightStep]:
        """Launched steps that are not committed, oldest first; always the same object."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Number of the newest launched step."""

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """True while a request waits or runs, or a launched step is not committed. Paused sessions do not count."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Take in a request; it waits for its turn.

        Raises:
            InvalidRequest: its id is in use, or it could never run. Nothing has changed then.
        """

    @abstractmethod
    def abort(self, ids: Iterable[str]) -> list[TokenOutput]:
        """End requests wherever they are. Unknown and finished ones are ignored: they may have just ended.

        Returns:
            The terminal output of each that was alive.
        """

    @abstractmethod
    def schedule(self) -> StepPlan | None:
        """Plan and launch the next step. Return None if nothing can run before a commit or an arrival."""

    @abstractmethod
    def commit(self, result: StepResult) -> list[TokenOutput]:
        """Take in the outcome of the oldest launched step; return the outputs that it brings its requests."""

    @abstractmethod
    def fail_in_flight(self, error: str) -> list[TokenOutput]:
        """End the requests of all launched steps, one of which raised; return their terminal outputs."""

    @abstractmethod
    def reset_prefix_cache(self, preempt_running: bool) -> bool:
        """Forget all cached prefixes, as after a change of weights.

        Args:
            preempt_running: send running requests back to the queue first, to be recomputed, paused sessions too.

        Returns:
            False if requests hold pages (or a launched step still uses them); nothing is forgotten then.
        """

    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """Return counters since the start, and the state now: fields of `EngineStats`, those without a default."""

    # --- for those who look on --------------------------------------------------------------------------------------

    @property
    def first_wait_reason(self) -> str:
        """Reason why the first waiting request waits; "" if none waits."""
        return ""

    @property
    def is_stuck(self) -> bool:
        """True if a request could go on, nothing runs, and no launched step's commit could change that: a bug.

        Meaningful after a `schedule()` that returned None.
        """
        return False

    def take_preempted(self) -> list[str]:
        """Return the ids of requests preempted since the last call, in order."""
        return []

    def explain(self, request_id: str) -> str:
        """Return why a request was not scheduled in the last step; "" if it was.

        Raises:
            KeyError: no such request is alive.
        """
        return self.requests[request_id].wait_reason

    # --- features ---------------------------------------------------------------------------------------------------

    def wake(self, request_id: str) -> None:
        """Let a request go on that waited for an event, such as its grammar or its remote KV; ignore all others."""
        return

    def extend(self, request_id: str, turn: TurnInput) -> None:
        """Continue a session with further input, at once or when its turn ends.

        Raises:
            InvalidRequest: it has ended, or cannot have this input.
        """
        raise InvalidRequest(f"the scheduler of this engine, {type(self).__name__}, does not serve {Feature.SESSIONS}")

    def begin_turns(self) -> list[TokenOutput]:
        """Resume paused sessions that have further input; return the last outputs of those that have no room for it."""
        return []

    def take_queries(self) -> list[KVQuery]:
        """Return the queries for the sources of KV before the next step, only for requests that may begin in it."""
        return []

    def apply_transfer_event(self, event: TransferEvent) -> None:
        """Apply an event from a source of KV."""
        return

    def resource(self, kind: type[Kind]) -> Kind | None:
        """Return the resource of a kind, or None."""
        return None
