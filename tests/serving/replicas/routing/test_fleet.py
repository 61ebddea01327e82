"""Eight simulated engines: `LeastCost` keeps prefixes together, and the work apart, as no simpler policy does both."""

import random

import pytest
from benchmarks.fleet import AtRandom, Fleet, conversations, infinite_hit_rate, tool_agents

from tokenmill.serving.replicas.routing.policies import LeastCost

TRACES = {
    "conversations": lambda rng: conversations(rng, num_sessions=700, rate=24),
    "tool agents": lambda rng: tool_agents(rng, num_requests=3000, rate=60, num_prompts=20),
}


@pytest.mark.parametrize("name", TRACES)
def test_hits_are_nearly_those_of_an_infinite_cache_and_work_is_even(name):
    seed = random.randrange(2**32)
    trace = TRACES[name](random.Random(seed))
    outcome = Fleet(LeastCost()).run(trace)
    assert outcome.hit_rate >= 0.95 * infinite_hit_rate(trace), f"seed {seed}"
    assert outcome.imbalance <= 1.3, f"seed {seed}"
    assert sum(outcome.requests) == len(outcome.first_token) == len(trace), f"seed {seed}: each is answered once"


def test_the_fleet_tells_a_good_policy_from_none():
    seed = random.randrange(2**32)
    trace = conversations(random.Random(seed), num_sessions=200, rate=20)
    assert Fleet(AtRandom(seed)).run(trace).hit_rate < 0.5 * infinite_hit_rate(trace), f"seed {seed}"


def test_a_fleet_repeats_itself():
    seed = random.randrange(2**32)
    trace = tool_agents(random.Random(seed), num_requests=200, rate=60)
    assert Fleet(LeastCost()).run(trace) == Fleet(LeastCost()).run(trace), f"seed {seed}"
