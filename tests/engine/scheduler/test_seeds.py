"""The seed of a request's draws: the client's, or one of the engine's seed and the request's arrival."""

from __future__ import annotations

from tokenmill.core.request import Request
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.scheduler.plan_builder import request_seed


def seeds(engine_seed: int, **params: int) -> list[int]:
    requests = [Request(str(n), [1], SamplingParams(**params), arrival=n, max_tokens_total=2) for n in range(60)]  # type: ignore[arg-type]
    return [request_seed(request, engine_seed) for request in requests]


def test_a_client_that_brings_a_seed_gets_it() -> None:
    assert set(seeds(3, seed=11)) == {11}
    assert set(seeds(3, seed=0)) == {0}


def test_others_get_seeds_of_their_own_that_the_engines_seed_decides() -> None:
    assert seeds(3) == seeds(3)
    assert len({*seeds(3), *seeds(4)}) == 120


def test_a_seed_is_a_signed_64_bit_integer() -> None:
    drawn = seeds(0)
    assert all(-(2**63) <= seed < 2**63 for seed in drawn)
    assert min(drawn) < -(2**60)
    assert max(drawn) > 2**60
