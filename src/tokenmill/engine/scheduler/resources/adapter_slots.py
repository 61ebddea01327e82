"""`AdapterSlots`: track which adapters the requests with rows use, and which request gets a slot next.

A step multiplies by a limited number of adapters, so their slots are a counted resource. A request takes part in the
slot of its adapter as long as it owns a row; an unused slot keeps its adapter until another needs it,
least recently used first. Requests whose adapter has no slot are passed over.

Every request gets a slot in the end: one passed over for `aging_steps` steps is promoted: it gets the slot that has
been held longest. From then on no request joins that slot, and those in it yield as soon as each has brought a token
since it began, or at once where their class comes after the promoted request's; so every turn of a slot advances all
requests in it that can advance, and the wait is bounded by the turns of requests that waited longer.

Counts steps, knows no clock: the same calls give the same choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.plan import StepPlan
from tokenmill.core.request import Request
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.policies import View
from tokenmill.engine.scheduler.resources.resource import Resource
from tokenmill.engine.scheduler.seniority import is_ready


@dataclass(slots=True)
class _Slot:
    """The slot of one adapter.

    Attributes:
        held_since: the step in which a request joined the slot while it was empty.
        used_at: the step in which a request last joined or left it.
        users: requests with rows, by id, and how many tokens each had when it got its row.
    """

    number: int
    held_since: int
    used_at: int
    users: dict[str, tuple[Request, int]] = field(default_factory=dict)


class AdapterSlots(Resource):
    """Slots by the digests of adapters.

    Args:
        num_slots: adapters in a step at most.
        aging_steps: steps that a request is passed over before a slot is freed for it.
    """

    def __init__(self, num_slots: int, aging_steps: int) -> None:
        self.num_slots = num_slots
        self._aging_steps = aging_steps
        self._slots: dict[str, _Slot] = {}
        self._passed_since: dict[str, tuple[int, Request]] = {}  # by request: the step, and itself
        self._closing = ""
        self._promoted: Request | None = None  # it waits for the closed slot, or has it now

    def begin_step(self, step: int, view: View) -> Iterable[Request]:
        """Return the users of a slot that another adapter has waited for long enough."""
        if view.is_idle:  # no step would pass in which it is noted who waits
            for request in view.waiting:
                if request.row is None and is_ready(request):
                    self.reason_to_wait(request, step)
        return self._yielding(step, view.is_idle)

    def reason_to_wait(self, request: Request, step: int) -> str:
        """Return why a request cannot get a row now; "" if its adapter has or can have a slot, or it needs none."""
        adapter = request.cache_key.adapter
        if not adapter or (self._has_slot_for(adapter) and adapter != self._closing):
            self._passed_since.pop(request.id, None)
            return ""
        self._passed_since.setdefault(request.id, (step, request))
        if adapter == self._closing:
            why = f"whose slot is promised to a request that has waited for {self._aging_steps} steps"
        else:
            why = "the slot is in use" if self.num_slots == 1 else f"all {self.num_slots} slots are in use"
        return f"needs adapter {request.adapter_name}, {why}"

    def acquire(self, request: Request, match: PrefixMatch, num_tokens: int, step: int) -> str:
        """Add a request to its adapter's slot, which is there: else it would have been passed over."""
        adapter = request.cache_key.adapter
        if not adapter:
            return ""
        slot = self._slots.get(adapter)
        if slot is None:
            slot = self._slots[adapter] = _Slot(self._take_number(), step, step)
        if not slot.users:
            slot.held_since = step
        slot.users[request.id] = request, request.num_tokens
        slot.used_at = step
        self._passed_since.pop(request.id, None)
        if self._promoted is not None and adapter == self._promoted.cache_key.adapter:
            self._closing, self._promoted = "", None
        return ""

    def row_fields(self, request: Request) -> Mapping[str, Any]:
        """Return the slot of a request's adapter."""
        adapter = request.cache_key.adapter
        return {"adapter_slot": self._slots[adapter].number} if adapter else {}

    def release(self, request: Request, step: int) -> None:
        """Remove a request that gives its row back from its slot."""
        slot = self._slots.get(request.cache_key.adapter)
        if slot is not None and slot.users.pop(request.id, None) is not None:
            slot.used_at = step
            if request.cache_key.adapter == self._closing and not slot.users:
                self._assign_closed_slot()

    def ended(self, request: Request) -> None:
        """Forget a request that has ended, perhaps without ever getting a row."""
        self._passed_since.pop(request.id, None)
        if request is self._promoted:
            self._closing, self._promoted = "", None

    def _yielding(self, step: int, is_idle: bool) -> list[Request]:
        """Return the requests that must give up their rows now, since another has waited long enough for a slot.

        Args:
            is_idle: no request runs, so no step would ever pass.
        """
        if self._promoted is None:
            self._promote_oldest(step, 0 if is_idle else self._aging_steps)
        if not self._closing:
            return []
        promoted, users = self._promoted, self._slots[self._closing].users.values()
        assert promoted is not None, "a slot is closed for a promoted request"
        # A request behind the promoted one may gain nothing for as long as others of its class come.
        return [one for one, num_tokens in users if is_idle or one.is_behind(promoted) or _has_gained(one, num_tokens)]

    def check_invariants(self, owners: Sequence[Request], plans: Sequence[StepPlan]) -> None:
        """Raise AssertionError if slots and the requests that own rows disagree."""
        numbers = [slot.number for slot in self._slots.values()]
        assert len(set(numbers)) == len(numbers) <= self.num_slots, "two adapters in a slot"
        assert all(0 <= number < self.num_slots for number in numbers), "a slot that does not exist"
        users = {request_id for slot in self._slots.values() for request_id in slot.users}
        assert users == {request.id for request in owners if request.cache_key.adapter}, (
            "a request with a row and no slot"
        )

    def _promote_oldest(self, step: int, aging_steps: int) -> None:
        """Promise the slot held for longest to the request that has waited longest, if both last `aging_steps`."""
        waiting = self._passed_since.values()
        since, promoted = min(waiting, key=lambda one: (one[0], one[1].arrival), default=(step, None))
        if promoted is None or step - since < aging_steps:
            return
        adapter = promoted.cache_key.adapter
        held = [(slot.held_since, slot.number, name) for name, slot in self._slots.items() if slot.users]
        if held and step - min(held)[0] >= aging_steps and not self._has_slot_for(adapter):
            self._promoted, self._closing = promoted, min(held)[2]

    def _has_slot_for(self, adapter: str) -> bool:
        return adapter in self._slots or len(self._slots) < self.num_slots or bool(self._unused())

    def _unused(self) -> list[tuple[int, int, str]]:
        """Return the slots without users and without a promise, least recently used first."""
        kept = None if self._promoted is None else self._promoted.cache_key.adapter
        slots = [
            (slot.used_at, slot.number, name) for name, slot in self._slots.items() if not slot.users and name != kept
        ]
        return sorted(slots)

    def _take_number(self) -> int:
        """Take a free slot, or that of the least recently used adapter."""
        if len(self._slots) < self.num_slots:
            taken = {slot.number for slot in self._slots.values()}
            return min(set(range(self.num_slots)) - taken)
        unused = self._unused()
        assert unused, "a request joins only where there is a slot for it"
        return self._slots.pop(unused[0][2]).number

    def _assign_closed_slot(self) -> None:
        """Give the closed slot, now empty, to the promoted request alone."""
        assert self._promoted is not None, "a slot is closed for a promoted request"
        slot = self._slots.pop(self._closing)
        self._slots[self._promoted.cache_key.adapter] = _Slot(slot.number, slot.used_at, slot.used_at)
        self._closing = ""


def _has_gained(request: Request, num_tokens: int) -> bool:
    """Return True if a request has advanced since it got its row, so that giving it up costs it no progress."""
    return not request.is_running or request.num_tokens > num_tokens
