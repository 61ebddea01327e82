"""Count the restarts of a part, and time them."""

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.serving.replicas.restarts import BACK_OFF_MEMORY_SECONDS, BACK_OFF_SECONDS, LIMIT_SECONDS, Restarts


def test_pauses_grow_and_the_last_one_stays() -> None:
    restarts = Restarts(100)
    pauses = [restarts.died(now) for now in range(6)]
    assert pauses == [*BACK_OFF_SECONDS, BACK_OFF_SECONDS[-1], BACK_OFF_SECONDS[-1]]


def test_a_death_long_after_the_others_is_the_first_again() -> None:
    restarts = Restarts(100)
    assert [restarts.died(now) for now in (0.0, 1.0)] == [0.0, 1.0]
    assert restarts.died(1.5 + BACK_OFF_MEMORY_SECONDS) == BACK_OFF_SECONDS[0]


def test_without_restarts_the_first_death_is_the_last() -> None:
    assert Restarts(0).died(0.0) is None


def test_the_two_deaths_of_a_convict_do_not_count() -> None:
    restarts = Restarts(2)
    for now in range(0, 20, 2):
        assert restarts.died(now) == 0.0
        assert restarts.died(now + 1, is_explained=True) == 0.0
    assert [restarts.died(now) for now in (20, 21, 22)] == [0.0, 1.0, None]


@given(st.integers(1, 4), st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_no_more_than_the_limit_come_back_within_a_minute(most: int, gaps: list[float]) -> None:
    restarts, now, deaths = Restarts(most), 0.0, []
    for gap in gaps:
        now += gap
        deaths.append(now)
        may_return = sum(now - death <= LIMIT_SECONDS for death in deaths) <= most
        assert (restarts.died(now) is not None) == may_return
