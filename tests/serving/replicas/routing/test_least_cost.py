"""The engines that `LeastCost` chooses: prefixes stay where they are, bursts spread, and nothing goes to the dead."""

import random

import pytest

from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.part_messages import EngineReport
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.replicas.routing.policies import Candidate, FewestInFlight, LeastCost, policy_of
from tokenmill.serving.replicas.routing.prefix_index import PrefixIndex
from tokenmill.serving.replicas.routing.router import Router

SIZE = 16
SYSTEM = list(range(1000, 1000 + 20 * SIZE))


def router(num_engines: int = 2, page_size: int = SIZE) -> Router:
    made = Router(range(num_engines), LeastCost())
    made.begin_routing(page_size, "model")
    return made


def request(name: str, tokens: list[int], **fields) -> AddRequest:
    return AddRequest(id=name, prompt_token_ids=tokens, params=SamplingParams(), **fields)


def pages(tokens: list[int], salt: str = "") -> list[int]:
    return PrefixIndex(SIZE, "model").names_of(request("", tokens, cache_salt=salt))


def first_token(name: str) -> TokenOutput:
    return TokenOutput(name, [1])


def end(name: str) -> TokenOutput:
    return TokenOutput(name, [1], FinishReason.STOP)


def stored(engine: int, names: list[int], **load: int) -> EngineReport:
    return EngineReport(engine=engine, changes=[(True, names)], **load)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([Candidate(0, 0, 500), Candidate(0, 0, 20)], 1),
        ([Candidate(0, 0, 500), Candidate(30, 0, 20)], 0),
        ([Candidate(1, 60_000, 16), Candidate(1, 0, 500)], 1),
        ([Candidate(1, 1000, 16), Candidate(1, 0, 500)], 0),
        ([Candidate(2, 0, 100), Candidate(1, 0, 100), Candidate(1, 1, 100)], 1),
    ],
    ids=["the cache decides", "until many are there", "or wait there for long", "and not for a while", "then the load"],
)
def test_the_least_of_work_and_load_wins(candidates, chosen):
    assert LeastCost().choose(dict(enumerate(candidates))) == chosen


@pytest.mark.parametrize("policy", ["cost", "fewest"])
def test_among_equals_each_has_its_turn(policy):
    chosen = policy_of(policy, last=1)
    equal = dict.fromkeys(range(4), Candidate(1, 2, 3))
    assert [chosen.choose(equal) for _ in range(6)] == [2, 3, 0, 1, 2, 3]


def test_a_prefix_stays_where_its_pages_are_reported():
    two = router()
    two.apply_report(stored(1, pages(SYSTEM)))
    for number in range(5):
        assert two.route(request(str(number), [*SYSTEM, number])) == 1
        two.ended([first_token(str(number))])


def test_a_prefix_stays_where_it_is_about_to_be_computed():
    two = router()
    two.apply_report(EngineReport(engine=0, num_others=2))
    assert two.route(request("a", SYSTEM)) == 1
    assert two.route(request("b", [*SYSTEM, 7])) == 1, "a is still on its way there"


def test_pages_that_never_came_attract_nobody():
    two = router()
    assert two.route(request("a", SYSTEM)) == 0
    two.leave(["a"])
    assert two.route(request("b", SYSTEM)) == 1, "the turn goes on"
    two.ended([first_token("b")])
    assert two.route(request("c", SYSTEM)) == 0, "b's first token came, and no page was reported"


def test_evicted_pages_attract_nobody():
    two = router()
    two.apply_report(stored(1, pages(SYSTEM)))
    two.apply_report(EngineReport(engine=1, changes=[(False, pages(SYSTEM)[::-1])]))
    assert [two.route(request(name, SYSTEM)) for name in "a"] == [0]


def test_another_salt_goes_where_there_is_room():
    two = router()
    two.apply_report(stored(1, pages(SYSTEM, "mine")))
    two.route(request("busy", [1], engine=1))
    assert two.route(request("a", SYSTEM)) == 0
    assert two.route(request("b", SYSTEM, cache_salt="mine")) == 1


def test_a_burst_spreads_although_no_report_comes():
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    many = router(4)
    counts = [0] * 4
    for number in range(100):
        counts[many.route(request(str(number), [rng.randrange(1000) for _ in range(200)]))] += 1
    assert max(counts) - min(counts) <= 1, f"seed {seed}"


def test_a_burst_spreads_although_reports_are_stale():
    two = router()
    for _ in range(10):
        two.apply_report(EngineReport(engine=0, num_others=0))
        two.apply_report(EngineReport(engine=1, num_others=3, num_queued_tokens=60))
        two.route(request(str(random.random()), [1] * 20))
    assert two._loads[0].num_open > two._loads[1].num_open > 0, "both, and fewer where there is more already"


def test_what_a_report_has_counted_is_not_counted_again():
    two = router()
    for name in "abc":
        two.route(request(name, [7] * 100, engine=0))
    assert two._loads[0].num_queued_tokens == 100 + 4 + 4, "of the second and third, six pages are on their way"
    two.apply_report(EngineReport(engine=0, num_taken=2, num_queued_tokens=50))
    assert two._loads[0].num_queued_tokens == 50 + 4
    two.ended([first_token("a"), first_token("c")])
    assert two._loads[0].num_queued_tokens == 50, "a was in the report"
    two.leave(["b"])
    assert two._loads[0].num_requests == 2


def test_requests_of_other_text_workers_count():
    two = router()
    two.apply_report(EngineReport(engine=0, num_others=4))
    assert [two.route(request(str(number), [1, 2])) for number in range(4)] == [1] * 4


def test_an_engine_that_dies_is_forgotten_with_its_pages():
    two = router()
    two.apply_report(stored(1, pages(SYSTEM), num_others=9, num_queued_tokens=10**6))
    assert two.route(request("a", [*SYSTEM, 1], session="s", engine=1)) == 1
    two.lose(1)
    assert "a" not in two
    two.apply_report(stored(1, pages(SYSTEM)))  # it was on its way
    assert [two.route(request(name, [*SYSTEM, 1], session="s")) for name in "ab"] == [0, 0]
    two.ended([first_token("a"), first_token("b")])
    two.apply_report(stored(0, pages(SYSTEM)))
    two.gain(1)
    assert two.route(request("c", [*SYSTEM, 1])) == 0, "the new life has nothing of it"
    assert two.route(request("d", list(range(50)))) == 1
    two.ended([end("a"), end("b"), end("c"), end("d")])
    assert [two._loads[engine].num_requests for engine in (0, 1)] == [0, 0]


def test_a_session_stays_whatever_is_cached_elsewhere():
    two = router()
    assert two.route(request("a", [1, 2], session="s")) == 0
    two.apply_report(stored(1, pages(SYSTEM)))
    assert two.route(request("b", SYSTEM, session="s")) == 0
    assert two.route(request("c", SYSTEM)) == 1
    assert two.route(request("d", SYSTEM, session="s", engine=1)) == 1, "who names an engine moves the session"
    assert two.route(request("e", SYSTEM, session="s")) == 1


def test_sessions_are_forgotten_in_the_order_of_their_last_call(monkeypatch):
    monkeypatch.setattr("tokenmill.serving.replicas.routing.router.MAX_SESSIONS", 2)
    two = Router((0, 1), FewestInFlight())
    for session in "abac":
        two.route(request(session, [1], session=session))
    assert set(two._engine_of_session) == {"a", "c"}


def test_the_same_calls_give_the_same_choices():
    seed = random.randrange(2**32)
    assert run(seed) == run(seed), f"seed {seed}"


def run(seed: int) -> list[int]:
    rng = random.Random(seed)
    many, chosen, alive = router(3), [], []
    prefixes = [[rng.randrange(100) for _ in range(rng.randrange(200))] for _ in range(5)]
    for number in range(200):
        tokens = rng.choice(prefixes) + [rng.randrange(100) for _ in range(1 + rng.randrange(40))]
        chosen.append(many.route(request(str(number), tokens)))
        alive.append(str(number))
        if rng.random() < 0.5:
            many.apply_report(stored(chosen[-1], pages(tokens), num_taken=rng.randrange(200)))
        if rng.random() < 0.8:
            many.ended([end(alive.pop(rng.randrange(len(alive))))])
    many.ended([end(name) for name in alive])
    for load in many._loads.values():
        assert (load.num_open, load._early) == (0, {})
    assert not any(many._index._expected.values())
    return chosen


def test_without_prefix_caching_only_queues_count():
    two = router(page_size=0)
    two.route(request("a", SYSTEM))
    two.ended([first_token("a")])
    assert two.route(request("b", SYSTEM)) == 1
