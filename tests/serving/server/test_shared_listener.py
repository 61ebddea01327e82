"""Share the connections of one socket between processes."""

import random

from tokenmill.serving.server.http.shared_listener import DEAF_SECONDS, MOST_AHEAD, ConnectionCounts


def test_whoever_has_more_steps_back_while_the_others_are_awake() -> None:
    now = [1.0]
    counts = ConnectionCounts(3, lambda: now[0])
    counts.note(0, 5)
    assert not counts.is_ahead(0), "the others have not begun"
    counts.note(1, 5)
    assert not counts.is_ahead(0)
    counts.note(1, 5 - MOST_AHEAD)
    assert not counts.is_ahead(0)
    counts.note(2, 0)
    assert counts.is_ahead(0) and counts.is_ahead(1) and not counts.is_ahead(2)
    now[0] += DEAF_SECONDS
    counts.note(0, 6)
    counts.note(1, 5)
    assert not counts.is_ahead(0) and not counts.is_ahead(1), "the third is not heard any more"


def test_in_whatever_order_they_accept_none_has_many_more() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(50):
        num_processes, open_ = rng.randrange(2, 6), []
        counts = ConnectionCounts(num_processes, lambda: 1.0)
        has = [0] * num_processes
        for index in range(num_processes):
            counts.note(index, 0)
        for _ in range(rng.randrange(1, 200)):
            taker = rng.choice([index for index in range(num_processes) if not counts.is_ahead(index)])
            has[taker] += 1
            open_.append(taker)
            counts.note(taker, has[taker])
        assert max(has) - min(has) <= MOST_AHEAD + 1
        for one in open_:
            has[one] -= 1
            counts.note(one, has[one])
        assert has == [0] * num_processes and not any(map(counts.is_ahead, range(num_processes)))
