"""`ModelRecord`: what the keeper knows of one model, the rules for it, and the claims of requests on it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

from tokenmill.serving.models.states import NEXT, RESIDENT, SERVING, ModelState
from tokenmill.serving.replicas.restarts import Restarts

NEVER = math.inf
_RESTARTS = 2


class Rules(msgspec.Struct, frozen=True):
    """Rules for one model.

    Attributes:
        num_bytes: that it takes from its start to its exit, unless it sleeps.
        pinned: it leaves only when it is told to.
        ttl: seconds without a request after which it leaves; 0: at once.
        group: of models of one group only one is resident.
    """

    num_bytes: int
    pinned: bool = False
    ttl: float = NEVER
    group: str | None = None


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's claim on a model; `number`: in the order of all claims."""

    model: str
    number: int


@dataclass(slots=True, eq=False)
class ModelRecord:
    """One model, as the keeper knows it.

    Attributes:
        waiting, using: claims in order, and those that were admitted.
        num_bytes: that it takes now.
        used: number of the last use. begun: number of the last start. used_at: time of the last use.
        ttl: the last request's, or that of the rules.
        asleep_bytes: that it takes while it sleeps; None: it cannot, or would not when it was last told to.
        must_leave: it was told to unload.
        problem, exit_code: of the last death. given_up: it is not tried before `retry_at`.
    """

    name: str
    rules: Rules
    ttl: float
    state: ModelState = ModelState.UNLOADED
    waiting: deque[Ticket] = field(default_factory=deque)
    using: set[Ticket] = field(default_factory=set)
    num_bytes: int = 0
    used: int = 0
    begun: int = 0
    used_at: float = 0.0
    asleep_bytes: int | None = None
    must_leave: bool = False
    deaths: Restarts = field(default_factory=lambda: Restarts(_RESTARTS))
    problem: str = ""
    exit_code: int | None = None
    given_up: bool = False
    retry_at: float = -math.inf

    @property
    def is_idle(self) -> bool:
        """True if it could serve, and nobody has it."""
        return self.state in SERVING and not self.using

    @property
    def is_going(self) -> bool:
        """True if some of its memory will be free in a moment."""
        return self.state in (ModelState.UNLOADING, ModelState.FALLING_ASLEEP)

    @property
    def sleep_frees(self) -> int:
        """Bytes that are free once it sleeps, if it is awake and can."""
        if self.asleep_bytes is None or self.state is ModelState.SLEEPING:
            return 0
        return self.rules.num_bytes - self.asleep_bytes

    @property
    def soon_free(self) -> int:
        """Bytes that are free once it has gone, or sleeps."""
        return self.sleep_frees if self.state is ModelState.FALLING_ASLEEP else self.num_bytes * self.is_going

    @property
    def needs_bytes(self) -> int:
        """Bytes that have to be free for it to serve, once it has gone or sleeps if it is about to."""
        if self.is_going:
            return self.sleep_frees if self.state is ModelState.FALLING_ASLEEP else self.rules.num_bytes
        return self.rules.num_bytes - self.num_bytes

    @property
    def expires_at(self) -> float:
        """Time at which it leaves for want of requests."""
        can_leave = self.state in (ModelState.READY, ModelState.SLEEPING)
        is_kept = not can_leave or self.using or self.waiting or self.rules.pinned
        return NEVER if is_kept else self.used_at + self.ttl

    def excludes(self, other: ModelRecord) -> bool:
        """Return True if another model may not be resident beside it."""
        return self is not other and self.rules.group is not None and self.rules.group == other.rules.group

    def enter(self, state: ModelState) -> None:
        """Change the state, and what it takes."""
        assert state in NEXT[self.state], f"{self.state} is not followed by {state}"
        self.state = state
        if state is ModelState.SLEEPING:
            assert self.asleep_bytes is not None, "one that cannot sleep was not told to"
            self.num_bytes = self.asleep_bytes
        elif state is not ModelState.UNLOADING:  # that ends with its exit
            self.num_bytes = self.rules.num_bytes if state in RESIDENT else 0
