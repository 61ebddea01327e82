"""`Keeper`: decides which model is loaded and which leaves, in bytes. It starts nothing and has no clock.

    ask ──> waiting ──> (the model's turn: one load at a time) ──> admitted ──> done
                          room = budget - (loading + ready + draining + unloading)

A model whose turn it is starts, or wakes up, when it fits beside all that is resident. Until then models that are idle
sleep, the least recently used first; if that frees too little they leave, and if that is not enough, busy ones drain:
they finish what they have begun and take nothing new. So each wait ends once the answers that run when it begins have
ended, and so many models stand before it.

Invariants, after each call: what is resident never exceeds the budget; at most one model loads; a model that answers,
loads or is pinned is not told to leave to make room; memory counts until the exit of the process that holds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import msgspec

from tokenmill.core.errors import QueueFull, TokenMillError
from tokenmill.core.sizes import size_text
from tokenmill.serving.models.errors import ModelFailed, ModelNotLoaded, ModelTooLarge
from tokenmill.serving.models.evictions import Victim, victims
from tokenmill.serving.models.records import NEVER, ModelRecord, Rules, Ticket
from tokenmill.serving.models.states import RESIDENT, ModelState
from tokenmill.serving.replicas.restarts import LIMIT_SECONDS

MAX_WAITING = 512
# Before a model that cannot be loaded as it is, is tried again.
_MEND_SECONDS = 10.0
_SOON = MappingProxyType(
    {ModelState.LOADING: "is loading", ModelState.FALLING_ASLEEP: "is about to sleep, and is woken up then"}
)
_WAITS = frozenset(ModelState) - {ModelState.LOADING, ModelState.READY, ModelState.DRAINING}


class Start(msgspec.Struct, frozen=True):
    """Start a model's processes."""

    model: str


class Stop(msgspec.Struct, frozen=True):
    """End a model's processes; nothing is open there."""

    model: str


class Sleep(msgspec.Struct, frozen=True):
    """Let a model give back the memory that it can do without; nothing is open there."""

    model: str


class Wake(msgspec.Struct, frozen=True):
    """Count a sleeping model as awake: it may take its memory again, which it does by itself."""

    model: str


class Admit(msgspec.Struct, frozen=True):
    """Let a request go to its model."""

    ticket: Ticket


class Refuse(msgspec.Struct, frozen=True):
    """End a request's wait with an error."""

    ticket: Ticket
    error: TokenMillError


Order = Start | Stop | Sleep | Wake | Admit | Refuse


class Keeper:
    """The models of one server and the memory that they share. The caller passes the time to each call."""

    def __init__(self, budget: int, rules: Mapping[str, Rules], max_waiting: int = MAX_WAITING) -> None:
        """`budget`: bytes for all models that are resident at a time."""
        self.budget = budget
        self._max_waiting = max_waiting
        self._numbers = itertools.count(1)
        self.models = {name: ModelRecord(name, rule, rule.ttl) for name, rule in rules.items()}

    # --- what comes from outside ------------------------------------------------------------------------------------

    def ask(self, name: str, now: float) -> Ticket:
        """Return a claim on a model, which `decide` admits or refuses later.

        Raises:
            ModelTooLarge: it can never be loaded.
            ModelFailed: it could not be loaded a moment ago.
            QueueFull: too many requests wait.
        """
        model = self.models[name]
        self.check_size(name)
        if model.given_up and now < model.retry_at:
            raise ModelFailed(f"model {name} cannot be served: {model.problem}")
        model.given_up = False
        if sum(len(one.waiting) for one in self.models.values()) >= self._max_waiting:
            raise QueueFull(f"{self._max_waiting} requests wait for models already; try again later")
        ticket = Ticket(name, next(self._numbers))
        model.waiting.append(ticket)
        return ticket

    def check_size(self, name: str) -> None:
        """Refuse a model that does not fit beside the pinned ones, even when no other is loaded.

        Raises:
            ModelTooLarge: with the numbers.
        """
        pinned = sum(one.rules.num_bytes for other, one in self.models.items() if one.rules.pinned and other != name)
        needed, room = self.models[name].rules.num_bytes, self.budget - pinned
        if needed > room:
            beside = f", of which pinned models take {size_text(pinned)}" if pinned else ""
            raise ModelTooLarge(
                f"model {name} needs {size_text(needed)} and can have {size_text(max(0, room))}: all models may take "
                f"{size_text(self.budget)} (--models-memory){beside}; a smaller --max-model-len or --quantization "
                "makes it smaller",
                "model",
            )

    def leave(self, ticket: Ticket, now: float, keep_alive: float | None = None) -> None:
        """Give a claim back, admitted or not.

        Args:
            keep_alive: seconds that the model stays without requests from now on; None: as before.
        """
        model = self.models[ticket.model]
        if ticket in model.using:
            model.using.remove(ticket)
            self._touch(model, now)
        elif ticket in model.waiting:
            model.waiting.remove(ticket)
        if keep_alive is not None:
            model.ttl = keep_alive

    def unload(self, name: str) -> list[Order]:
        """Let a model leave once it is idle; those that wait for it are refused."""
        model = self.models[name]
        error = ModelNotLoaded(f"model {name} was unloaded by an operator while the request waited for it")
        refused: list[Order] = [Refuse(ticket, error) for ticket in model.waiting]
        model.waiting.clear()
        if model.state in RESIDENT and model.state is not ModelState.UNLOADING:
            model.must_leave = True
        if model.state is ModelState.FAILED:
            model.enter(ModelState.UNLOADED)
            model.given_up = False
        return refused

    def replace(self, rules: Mapping[str, Rules]) -> None:
        """Take other models. What is resident stays as it is: until it has left, or until the next call."""
        for name in [one for one in self.models if one not in rules and self._is_away(one)]:
            del self.models[name]
        for name, rule in rules.items():
            if name not in self.models or self._is_away(name):
                self.models[name] = ModelRecord(name, rule, rule.ttl)

    def _is_away(self, name: str) -> bool:
        model = self.models[name]
        return model.state not in RESIDENT and not model.waiting

    def ready(self, name: str, now: float, asleep_bytes: int | None = None) -> None:
        """Note that a model takes requests now; `asleep_bytes`: that it will take asleep, None: it cannot."""
        model = self.models[name]
        if model.state is ModelState.LOADING:
            model.enter(ModelState.READY)
            model.problem, model.exit_code, model.ttl = "", None, model.rules.ttl
            self._touch(model, now)
            model.asleep_bytes = asleep_bytes

    def slept(self, name: str, asleep_bytes: int | None) -> None:
        """Note that a model has given memory back, and takes so much now.

        Args:
            asleep_bytes: None: it would not sleep; it is not told to again while it is loaded.
        """
        model = self.models[name]
        if model.state is ModelState.FALLING_ASLEEP:
            model.asleep_bytes = None if asleep_bytes is None else min(asleep_bytes, model.rules.num_bytes)
            model.enter(ModelState.READY if asleep_bytes is None else ModelState.SLEEPING)

    def exited(self, name: str, now: float, problem: str, exit_code: int, is_final: bool = False) -> list[Order]:
        """Note that the processes of a model are gone, and with them what it had open.

        Args:
            problem: how it ended, where it was not told to.
            is_final: starting it again as it is would end in the same way.
        """
        model = self.models[name]
        model.using.clear()
        model.must_leave = False
        if model.state is ModelState.UNLOADING:
            model.enter(ModelState.UNLOADED)
            return []
        model.enter(ModelState.FAILED)
        model.problem, model.exit_code = problem, exit_code
        pause = None if is_final else model.deaths.died(now)
        if pause is not None:
            model.retry_at = now + pause
            return []
        model.given_up = True
        model.retry_at = now + (_MEND_SECONDS if is_final else LIMIT_SECONDS)
        error = ModelFailed(f"model {name} cannot be served: {problem}")
        refused: list[Order] = [Refuse(ticket, error) for ticket in model.waiting]
        model.waiting.clear()
        return refused

    # --- what follows from it ---------------------------------------------------------------------------------------

    def decide(self, now: float, available: int | None = None) -> list[Order]:
        """Return what is to be done now; the states are those after it.

        Args:
            available: bytes that the machine has left; None: not known.
        """
        # Those who have waited for a model that is ready now have it before it may have to go.
        orders = [*self._leaving(now), *self._admitted(now)]
        while (head := self._head(now)) is not None and self.models[head].state is ModelState.SLEEPING:
            if self._victims(head, available) or not self._fits(head, available):
                break
            self.models[head].enter(ModelState.READY)
            orders += [Wake(head), *self._admitted(now)]
        chosen = [] if head is None else self._victims(head, available)
        for model in self.models.values():
            is_victim = any(model is victim.model for victim in chosen)
            if model.state is ModelState.DRAINING and not model.must_leave and not is_victim:
                model.enter(ModelState.READY)
        # One that is idle may be of use until the busy ones beside it are idle too.
        wait_for = [victim for victim in chosen if not victim.model.is_idle]
        for victim in wait_for or chosen:
            orders += self._send_away(victim.model, victim.sleeps)
        if head is not None and not chosen and self._fits(head, available):
            orders.append(self._start(head))
        return orders + self._admitted(now)

    def next_time(self, now: float) -> float:
        """Return the time at which `decide` may find something to do although nothing has happened."""
        retries = (model.retry_at for model in self.models.values() if model.waiting and model.retry_at > now)
        return min(itertools.chain(retries, (model.expires_at for model in self.models.values())), default=NEVER)

    def _leaving(self, now: float) -> Iterator[Order]:
        """Send away what was told to leave, and what has expired."""
        for model in self.models.values():
            if model.must_leave and model.state is ModelState.LOADING:
                model.enter(ModelState.UNLOADING)
                yield Stop(model.name)
            elif (model.must_leave and model.state is not ModelState.UNLOADING) or model.expires_at <= now:
                yield from self._send_away(model)

    def _send_away(self, model: ModelRecord, sleeps: bool = False) -> list[Order]:
        if model.is_idle and sleeps:
            model.enter(ModelState.FALLING_ASLEEP)
            return [Sleep(model.name)]
        if model.is_idle:
            model.enter(ModelState.UNLOADING)
            return [Stop(model.name)]
        if model.state is ModelState.READY:
            model.enter(ModelState.DRAINING)
        return []

    def _head(self, now: float) -> str | None:
        """Return the model whose turn it is to be loaded: its first claim is the oldest. None: no turn begins."""
        if any(model.state is ModelState.LOADING for model in self.models.values()):
            return None
        turns = {
            name: model.waiting[0].number
            for name, model in self.models.items()
            if model.waiting and model.state in _WAITS and model.retry_at <= now
        }
        return min(turns, key=turns.__getitem__, default=None)

    def _victims(self, head: str, available: int | None) -> list[Victim]:
        """Return the models that have to go, sleep or drain before a model can be loaded; see `victims`."""
        wanted = self.models[head]
        is_short = available is not None and available < wanted.needs_bytes
        return victims(wanted, list(self.models.values()), self.free, is_short)

    def _fits(self, head: str, available: int | None) -> bool:
        wanted = self.models[head]
        going = [model for model in self.models.values() if model.is_going]
        if going and (wanted in going or any(wanted.excludes(model) for model in going)):
            return False
        is_short = available is not None and available < wanted.needs_bytes
        return self.free >= wanted.needs_bytes and not (is_short and going)

    def _start(self, name: str) -> Order:
        model = self.models[name]
        model.enter(ModelState.LOADING)
        model.begun = next(self._numbers)
        return Start(name)

    def _admitted(self, now: float) -> list[Order]:
        orders: list[Order] = []
        for model in self.models.values():
            while model.state is ModelState.READY and model.waiting:
                ticket = model.waiting.popleft()
                model.using.add(ticket)
                self._touch(model, now)
                orders.append(Admit(ticket))
        return orders

    @property
    def free(self) -> int:
        """Bytes of the budget that no resident model takes."""
        return self.budget - sum(model.num_bytes for model in self.models.values())

    def _touch(self, model: ModelRecord, now: float) -> None:
        model.used, model.used_at = next(self._numbers), now

    # --- what is said of it -----------------------------------------------------------------------------------------

    def reason(self, ticket: Ticket) -> str:
        """Return why a claim waits, in one sentence."""
        model = self.models[ticket.model]
        if model.state in _SOON:
            return f"model {ticket.model} {_SOON[model.state]}"
        loading = next((name for name, one in self.models.items() if one.state is ModelState.LOADING), None)
        if loading is not None:
            return f"model {ticket.model} waits until model {loading} is loaded"
        if model.state is ModelState.FAILED:
            return f"model {ticket.model} has died and is started again: {model.problem}"
        busy = sorted(name for name, one in self.models.items() if one.state is ModelState.DRAINING)
        if busy:
            return f"model {ticket.model} waits for memory: {', '.join(busy)} finish what they have begun"
        leaving = sorted(name for name, one in self.models.items() if one.is_going)
        if leaving:
            return f"model {ticket.model} waits for the memory of {', '.join(leaving)}"
        return f"model {ticket.model} waits for its turn"
