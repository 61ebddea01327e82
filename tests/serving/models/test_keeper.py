"""The keeper against a slow, obvious model: random requests, loads, deaths, exits, and time that passes."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from tests.tiers import scaled
from tokenmill.core.errors import QueueFull
from tokenmill.serving.models.errors import ModelFailed, ModelTooLarge
from tokenmill.serving.models.keeper import Admit, Keeper, Refuse, Sleep, Start, Stop, Wake
from tokenmill.serving.models.records import NEVER, Rules
from tokenmill.serving.models.states import ModelState

RULES = {
    "small": Rules(2),
    "middle": Rules(4, ttl=30.0),
    "large": Rules(8),
    "pinned": Rules(2, pinned=True),
    "left": Rules(3, group="hands"),
    "right": Rules(3, group="hands"),
    "huge": Rules(11),
}
# That they take asleep; the others cannot sleep.
ASLEEP = {"small": 1, "middle": 1, "large": 3, "pinned": 1, "right": 1}
BUDGET = 10
MOST_WAITING = 20
NAMES = st.sampled_from(sorted(RULES))


class KeeperMachine(RuleBasedStateMachine):
    """Plays the world around a keeper, and keeps books of its own: lists and dictionaries, searched from end to end."""

    tickets = Bundle("tickets")

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.keeper = Keeper(BUDGET, RULES, MOST_WAITING)
        self.alive = {}  # name -> loading, serving, told to sleep, sleeping, told to stop
        self.taken = {}  # name -> bytes of those that are alive
        self.unwilling = set()  # would not sleep when they were told to
        self.waiting = []  # tickets in the order of their questions
        self.open = []
        self.idle_order = []  # served models, the least recently used first
        self.may_stop = set()  # told to unload
        self.ttl = {}
        self.since = {}
        self.retry = {}

    def decide(self, orders=()):
        for order in [*orders, *self.keeper.decide(self.now)]:
            match order:
                case Start(name):
                    self.check_start(name)
                    self.alive[name], self.taken[name] = "loading", RULES[name].num_bytes
                    self.unwilling.discard(name)
                case Sleep(name):
                    self.check_sleep(name)
                    self.alive[name] = "nodding"
                case Wake(name):
                    self.check_wake(name)
                    self.alive[name], self.taken[name] = "serving", RULES[name].num_bytes
                case Stop(name):
                    self.check_stop(name)
                    self.alive[name] = "stopping"
                    self.may_stop.discard(name)
                case Admit(ticket):
                    assert self.alive[ticket.model] == "serving"
                    first = next(one for one in self.waiting if one.model == ticket.model)
                    assert first is ticket, "in order"
                    self.waiting.remove(ticket)
                    self.open.append(ticket)
                    self.use(ticket.model)
                case Refuse(ticket, error):
                    assert str(error)
                    self.waiting.remove(ticket)
        # A decision is whole: made again at once, there is nothing left to do.
        assert self.keeper.decide(self.now) == []

    def use(self, name):
        if name in self.idle_order:
            self.idle_order.remove(name)
        self.idle_order.append(name)
        self.since[name] = self.now

    def check_start(self, name):
        assert name not in self.alive
        assert self.next_turn() == name
        assert sum(self.taken.values()) + RULES[name].num_bytes <= BUDGET
        assert "loading" not in self.alive.values()
        group = RULES[name].group
        assert group is None or all(RULES[one].group != group for one in self.alive)

    def check_wake(self, name):
        assert self.alive[name] == "sleeping" and self.next_turn() == name
        assert sum(self.taken.values()) - ASLEEP[name] + RULES[name].num_bytes <= BUDGET
        assert "loading" not in self.alive.values()

    def next_turn(self):
        return next(one.model for one in self.waiting if self.may_retry(one.model) and not self.is_serving(one.model))

    def check_sleep(self, name):
        assert self.alive[name] == "serving" and not RULES[name].pinned and name not in self.unwilling
        assert all(one.model != name for one in self.open), "one that answers is not put to sleep"
        assert self.missing() > 0, "there is room already"
        assert next(iter(self.could_sleep())) == name, "the least recently used"

    def could_sleep(self):
        idle = [one for one in self.idle_order if self.alive.get(one) == "serving" and self.is_idle(one)]
        excluded = RULES[self.next_turn()].group
        idle = [one for one in idle if excluded is None or RULES[one].group != excluded]
        return [one for one in idle if one in ASLEEP and one not in self.unwilling and not RULES[one].pinned]

    def missing(self):
        """Bytes that the next turn needs beyond what is free, or will be in a moment."""
        name = self.next_turn()
        state = self.alive.get(name)
        needed = RULES[name].num_bytes - (ASLEEP[name] if state in ("nodding", "sleeping") else 0)
        going = sum(self.taken[one] for one, state in self.alive.items() if state == "stopping")
        going += sum(RULES[one].num_bytes - ASLEEP[one] for one, state in self.alive.items() if state == "nodding")
        group = RULES[name].group
        if group is not None:
            there = [one for one, state in self.alive.items() if state in ("serving", "sleeping") and one != name]
            going += sum(self.taken[one] for one in there if RULES[one].group == group)
        return needed - (BUDGET - sum(self.taken.values())) - going

    def check_stop(self, name):
        assert self.alive[name] in ("loading", "serving", "sleeping")
        assert all(one.model != name for one in self.open), "one that answers is not stopped"
        if name in self.may_stop:
            return
        assert self.alive[name] in ("serving", "sleeping") and not RULES[name].pinned
        if self.now >= self.since[name] + self.ttl[name]:
            return
        wanted = self.next_turn()
        if RULES[wanted].group is not None and RULES[wanted].group == RULES[name].group:
            return
        missing = self.missing()
        assert missing > 0, "there is room already"
        assert sum(RULES[one].num_bytes - ASLEEP[one] for one in self.could_sleep()) < missing, "sleep is enough"
        states = ("serving", "sleeping")
        idle = [one for one in self.idle_order if self.alive.get(one) in states and self.is_idle(one)]
        assert next(one for one in idle if not RULES[one].pinned and one != wanted) == name, "the least recently used"

    def is_serving(self, name):
        return self.alive.get(name) == "serving"

    def is_idle(self, name):
        return all(one.model != name for one in self.open)

    def may_retry(self, name):
        return self.retry.get(name, 0.0) <= self.now

    @rule(target=tickets, name=NAMES)
    def ask(self, name):
        full = len(self.waiting) >= MOST_WAITING
        try:
            ticket = self.keeper.ask(name, self.now)
        except ModelTooLarge:
            assert RULES[name].num_bytes > BUDGET - (0 if name == "pinned" else 2)
            return None
        except ModelFailed:
            assert not self.may_retry(name)
            return None
        except QueueFull:
            assert full
            return None
        assert not full
        assert name != "huge"
        self.waiting.append(ticket)
        self.decide()
        return ticket

    @rule(ticket=consumes(tickets), keep_alive=st.sampled_from([None, None, 0.0, 5.0, NEVER]))
    def leave(self, ticket, keep_alive):
        if ticket is None:
            return
        name = ticket.model
        if ticket in self.open:
            self.open.remove(ticket)
            self.use(name)
        if ticket in self.waiting:
            self.waiting.remove(ticket)
        if keep_alive is not None:
            self.ttl[name] = keep_alive
        self.keeper.leave(ticket, self.now, keep_alive)
        assert self.keeper.reason(ticket)
        self.decide()

    @precondition(lambda self: "loading" in self.alive.values())
    @rule()
    def finish_loading(self):
        self.finish()

    def finish(self):
        name = next(name for name, state in self.alive.items() if state == "loading")
        self.alive[name] = "serving"
        self.ttl[name] = RULES[name].ttl
        self.use(name)
        self.keeper.ready(name, self.now, ASLEEP.get(name))
        self.decide()

    @precondition(lambda self: "nodding" in self.alive.values())
    @rule(data=st.data(), is_willing=st.booleans())
    def fall_asleep(self, data, is_willing):
        name = data.draw(st.sampled_from(sorted(one for one, state in self.alive.items() if state == "nodding")))
        self.nod(name, is_willing)

    def nod(self, name, is_willing):
        if is_willing:
            self.alive[name], self.taken[name] = "sleeping", ASLEEP[name]
        else:
            self.alive[name] = "serving"
            self.unwilling.add(name)
        self.keeper.slept(name, ASLEEP[name] if is_willing else None)
        self.decide()

    @precondition(lambda self: "stopping" in self.alive.values())
    @rule(data=st.data())
    def exit(self, data):
        name = data.draw(st.sampled_from(sorted(one for one, state in self.alive.items() if state == "stopping")))
        self.leave_memory(name)
        self.decide(self.keeper.exited(name, self.now, "told to", 0))

    def leave_memory(self, name):
        del self.alive[name], self.taken[name]

    @precondition(lambda self: any(state != "stopping" for state in self.alive.values()))
    @rule(data=st.data(), is_final=st.booleans())
    def die(self, data, is_final):
        name = data.draw(st.sampled_from(sorted(one for one, state in self.alive.items() if state != "stopping")))
        self.leave_memory(name)
        self.may_stop.discard(name)
        self.open = [one for one in self.open if one.model != name]
        orders = self.keeper.exited(name, self.now, "killed", -9, is_final)
        record = self.keeper.models[name]
        self.retry[name] = record.retry_at
        assert record.state is ModelState.FAILED and record.problem == "killed"
        assert bool(orders) == (record.given_up and any(one.model == name for one in self.waiting))
        assert record.given_up or not is_final
        self.decide(orders)

    @rule(name=NAMES)
    def unload(self, name):
        if self.alive.get(name) in ("loading", "serving", "nodding", "sleeping"):
            self.may_stop.add(name)
        orders = self.keeper.unload(name)
        assert [order.ticket for order in orders] == [one for one in self.waiting if one.model == name]
        self.decide(orders)

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0, 100.0]))
    def pass_time(self, seconds):
        self.now += seconds
        self.decide()

    @rule()
    def wake_up(self):
        """At the time that the keeper names, and not before, there is something to do."""
        until = self.keeper.next_time(self.now)
        if until == NEVER:
            return
        assert until >= self.now, "what was due is done"
        self.now = until
        self.decide()

    @invariant()
    def books_agree(self):
        states = {ModelState.LOADING: "loading", ModelState.UNLOADING: "stopping"}
        states |= {ModelState.FALLING_ASLEEP: "nodding", ModelState.SLEEPING: "sleeping"}
        states |= dict.fromkeys((ModelState.READY, ModelState.DRAINING), "serving")
        found = {name: states[one.state] for name, one in self.keeper.models.items() if one.state in states}
        assert found == self.alive
        assert {name: one.num_bytes for name, one in self.keeper.models.items() if one.num_bytes} == self.taken
        assert self.keeper.free == BUDGET - sum(self.taken.values()) >= 0
        waiting = sorted(
            (one for model in self.keeper.models.values() for one in model.waiting), key=lambda t: t.number
        )
        assert waiting == self.waiting
        assert {one for model in self.keeper.models.values() for one in model.using} == set(self.open)

    def teardown(self):
        """All that wait get their turn, if answers end, servers start and exit, and none dies."""
        for _ in range(8 * (len(self.waiting) + len(self.alive) + 1)):
            if not self.waiting:
                return
            self.now += 70.0
            self.decide()
            if "loading" in self.alive.values():
                self.finish()
            for name in [one for one, state in self.alive.items() if state == "nodding"]:
                self.nod(name, is_willing=True)
            for name in [one for one, state in self.alive.items() if state == "stopping"]:
                self.leave_memory(name)
                self.decide(self.keeper.exited(name, self.now, "told to", 0))
            for ticket in list(self.open):
                self.end(ticket)
        raise AssertionError(f"{len(self.waiting)} requests starve")

    def end(self, ticket):
        self.open.remove(ticket)
        self.use(ticket.model)
        self.keeper.leave(ticket, self.now, None)
        self.decide()


TestKeeper = KeeperMachine.TestCase
TestKeeper.settings = settings(max_examples=scaled(300), stateful_step_count=40, deadline=None)
