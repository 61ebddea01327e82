"""The keeper in cases that matter, one event at a time; `test_keeper.py` has random ones."""

import pytest

from tokenmill.serving.models.errors import ModelFailed, ModelTooLarge
from tokenmill.serving.models.keeper import Admit, Keeper, Sleep, Start, Stop, Wake
from tokenmill.serving.models.records import NEVER, Rules
from tokenmill.serving.models.states import ModelState


def loaded(keeper: Keeper, name: str, now: float = 0.0, asleep_bytes: int | None = None):
    """Load a model by a request, and return its ticket."""
    ticket = keeper.ask(name, now)
    keeper.decide(now)
    keeper.ready(name, now, asleep_bytes)
    assert Admit(ticket) in keeper.decide(now)
    return ticket


def test_a_model_in_use_is_not_evicted_and_takes_nothing_new_while_another_waits():
    keeper = Keeper(10, {"a": Rules(6), "b": Rules(6)})
    first = loaded(keeper, "a")
    other = keeper.ask("b", 1.0)
    assert keeper.decide(1.0) == []
    late = keeper.ask("a", 2.0)
    assert keeper.decide(2.0) == [], "its turn comes after b's"
    assert "finish" in keeper.reason(other)
    keeper.leave(first, 3.0)
    assert keeper.decide(3.0) == [Stop("a")]
    assert keeper.decide(3.0) == [], "its memory is not free before it has exited"
    keeper.exited("a", 4.0, "", 0)
    assert keeper.decide(4.0) == [Start("b")]
    keeper.ready("b", 5.0)
    assert keeper.decide(5.0) == [Admit(other)]
    keeper.leave(other, 6.0)
    assert keeper.decide(6.0) == [Stop("b")]
    keeper.exited("b", 7.0, "", 0)
    assert keeper.decide(7.0) == [Start("a")]
    keeper.ready("a", 8.0)
    assert keeper.decide(8.0) == [Admit(late)]


def test_a_model_that_is_spared_goes_on():
    keeper = Keeper(10, {"a": Rules(6), "b": Rules(6)})
    loaded(keeper, "a")
    other = keeper.ask("b", 1.0)
    keeper.decide(1.0)
    late = keeper.ask("a", 2.0)
    keeper.decide(2.0)
    keeper.leave(other, 3.0)
    assert keeper.decide(3.0) == [Admit(late)], "nobody waits for its memory any more"


def test_a_model_that_never_fits_is_refused_with_the_numbers():
    keeper = Keeper(4 << 30, {"a": Rules(5 << 30), "b": Rules(3 << 30), "p": Rules(2 << 30, pinned=True)})
    with pytest.raises(ModelTooLarge, match=r"5\.0 GiB and can have 2\.0 GiB"):
        keeper.ask("a", 0.0)
    with pytest.raises(ModelTooLarge, match=r"pinned models take 2\.0 GiB"):
        keeper.ask("b", 0.0)


def test_memory_that_others_use_is_made_up_for_by_one_more_eviction():
    keeper = Keeper(100, {"a": Rules(10), "b": Rules(10)})
    keeper.leave(loaded(keeper, "a"), 1.0)
    ticket = keeper.ask("b", 2.0)
    assert keeper.decide(2.0, available=5) == [Stop("a")]
    keeper.exited("a", 3.0, "", 0)
    assert keeper.decide(3.0, available=5) == [Start("b")], "its own check says what is missing"
    keeper.ready("b", 4.0)
    assert keeper.decide(4.0, available=5) == [Admit(ticket)]


def test_the_third_death_in_a_minute_ends_the_wait_and_a_minute_later_it_is_tried_again():
    keeper = Keeper(10, {"a": Rules(6)})
    ticket = keeper.ask("a", 0.0)
    now = 0.0
    for _ in range(2):
        assert keeper.decide(now) == [Start("a")]
        assert keeper.exited("a", now, "killed", -9) == []
        assert keeper.reason(ticket)
        now = max(now, keeper.next_time(now) if keeper.next_time(now) < NEVER else now)
    assert keeper.decide(now) == [Start("a")]
    (refusal,) = keeper.exited("a", now, "killed", -9)
    assert refusal.ticket is ticket and isinstance(refusal.error, ModelFailed)
    with pytest.raises(ModelFailed, match="killed"):
        keeper.ask("a", now + 30)
    keeper.ask("a", now + 61)
    assert keeper.decide(now + 61) == [Start("a")]


def test_models_sleep_before_they_leave_and_wake_without_a_load():
    keeper = Keeper(20, {name: Rules(8) for name in "abc"})
    for now, name in enumerate("ab"):
        ticket = keeper.ask(name, now)
        keeper.decide(now)
        keeper.ready(name, now, asleep_bytes=2)
        assert Admit(ticket) in keeper.decide(now)
        keeper.leave(ticket, now)
    third = keeper.ask("c", 2.0)
    assert keeper.decide(2.0) == [Sleep("a")]
    assert keeper.decide(2.0) == [], "its memory is not free before it sleeps"
    keeper.slept("a", 2)
    assert keeper.decide(2.0) == [Start("c")] and keeper.models["a"].state is ModelState.SLEEPING
    keeper.ready("c", 3.0, asleep_bytes=2)
    assert keeper.decide(3.0) == [Admit(third)]
    first = keeper.ask("a", 4.0)
    assert keeper.decide(4.0) == [Sleep("b")]
    keeper.slept("b", None)
    assert keeper.decide(4.0) == [Stop("b")], "it would not sleep"
    keeper.exited("b", 5.0, "", 0)
    assert keeper.decide(5.0) == [Wake("a"), Admit(first)]


def test_sleeping_models_leave_when_sleep_frees_too_little():
    keeper = Keeper(10, {"a": Rules(6), "b": Rules(9), "c": Rules(6)})
    keeper.leave(loaded(keeper, "a", asleep_bytes=2), 1.0)
    other = keeper.ask("b", 2.0)
    assert keeper.decide(2.0) == [Stop("a")], "asleep it would take 2, and there is 1"
    keeper.exited("a", 3.0, "", 0)
    assert keeper.decide(3.0) == [Start("b")]
    keeper.ready("b", 4.0, asleep_bytes=1)
    assert keeper.decide(4.0) == [Admit(other)]
    keeper.leave(other, 4.0)
    keeper.ask("c", 5.0)
    assert keeper.decide(5.0) == [Sleep("b")]
    keeper.unload("b")
    assert keeper.decide(5.0) == [], "one that is about to sleep is not stopped before it does"
    keeper.slept("b", 2)
    assert keeper.decide(5.0) == [Stop("b"), Start("c")]
