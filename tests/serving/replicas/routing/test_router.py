"""The engine that a text worker gives a request to; every request is forgotten when it ends."""

import random

import pytest

from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.replicas.routing.policies import FewestInFlight
from tokenmill.serving.replicas.routing.router import Router


def request(name: str, engine: int | None = None) -> AddRequest:
    return AddRequest(id=name, prompt_token_ids=[1], params=SamplingParams(), engine=engine)


def router(*engines: int, last: int = -1) -> Router:
    return Router(engines, FewestInFlight(last))


def end(name: str, reason: FinishReason | None = FinishReason.STOP) -> TokenOutput:
    return TokenOutput(name, [1], reason)


def test_requests_go_round_while_all_engines_have_as_many():
    four = router(0, 1, 2, 3)
    assert [four.route(request(str(number))) for number in range(6)] == [0, 1, 2, 3, 0, 1]


def test_the_turn_goes_on_where_it_was_and_not_at_the_first_engine():
    three, chosen = router(0, 1, 4), []
    for number in range(6):
        chosen.append(three.route(request(str(number))))
        three.ended([end(str(number))])
    assert chosen == [0, 1, 4, 0, 1, 4]


@pytest.mark.parametrize(("worker", "first"), [(0, 0), (1, 1), (2, 0), (3, 0)])
def test_text_workers_do_not_all_begin_with_the_same_engine(worker, first):
    assert router(0, 1, last=worker - 1).route(request("a")) == first


def test_the_engine_with_the_fewest_in_flight_is_next():
    two = router(0, 1)
    for name in "abcd":
        two.route(request(name))
    two.ended([end("b"), end("d"), end("a", None)])
    assert [two.route(request(name)) for name in "efg"] == [1, 1, 0]


def test_a_request_for_an_engine_goes_there_and_counts_there():
    two = router(0, 1)
    assert [two.route(request(name, engine=1)) for name in "ab"] == [1, 1]
    assert [two.route(request(name)) for name in "cd"] == [0, 0]


def test_aborts_are_for_the_engine_that_has_the_request_once():
    two = router(0, 1)
    for name in "abcd":
        two.route(request(name))
    two.ended([end("c")])
    assert two.leave(["d", "a", "nobody", "c", "b"]) == {1: ["d", "b"], 0: ["a"]}
    assert two.leave(["a", "b", "d"]) == {}
    two.ended([end("a"), end("b", FinishReason.ABORT)])
    assert [two.route(request(name)) for name in "ef"] == [0, 1], "nothing is counted twice"


def test_random_traffic_is_balanced_and_leaves_nothing():
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    many = router(*range(rng.randint(1, 5)))
    open_on: dict[str, int] = {}
    for number in range(500):
        name = str(number)
        before = {engine: list(open_on.values()).count(engine) for engine in many._loads}
        open_on[name] = many.route(request(name))
        assert before[open_on[name]] == min(before.values()), f"seed {seed}"
        for gone in rng.sample(sorted(open_on), rng.randint(0, min(2, len(open_on)))):
            engine = open_on.pop(gone)
            if rng.random() < 0.5:
                assert many.leave([gone]) == {engine: [gone]}, f"seed {seed}"
            else:
                many.ended([end(gone)])
    many.ended([end(name) for name in open_on])
    assert {load.num_open for load in many._loads.values()} == {0}
    assert not many._engine_of
