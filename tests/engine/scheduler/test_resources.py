"""A kind of resource that the engine does not have: a class of its own, and one line that installs it.

A request needs a lamp for each token of its prompt that is 7. It is a toy, but it has all that counts: what can never
fit is refused, a request waits for its lamps with a reason, and they come back once no launched step uses it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.engine.scheduler.harness import Harness, Settings
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.plan import StepPlan
from tokenmill.core.request import FinishReason, Request
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.loop import step_log
from tokenmill.engine.scheduler.resources.resource import Resource, Resources


class Lamps(Resource):
    """Lamps that requests hold while they have a row."""

    def __init__(self, num_lamps: int) -> None:
        self.num_lamps = num_lamps
        self.held: dict[str, int] = {}

    @property
    def num_left(self) -> int:
        return self.num_lamps - sum(self.held.values())

    def check(self, request: Request, num_tokens: int) -> None:
        if wanted(request) > self.num_lamps:
            raise InvalidRequest(f"needs {wanted(request)} lamps; there are {self.num_lamps}")

    def acquire(self, request: Request, match: PrefixMatch, num_tokens: int, step: int) -> str:
        if wanted(request) > self.num_left:
            return f"needs {wanted(request)} lamps, {self.num_left} of {self.num_lamps} are left"
        self.held[request.id] = wanted(request)
        return ""

    def release(self, request: Request, step: int) -> None:
        del self.held[request.id]

    def check_invariants(self, owners: Sequence[Request], plans: Sequence[StepPlan]) -> None:
        assert self.held == {request.id: wanted(request) for request in owners}, "a lamp is lost, or held twice"
        assert self.num_left >= 0, "more lamps are held than there are"


def wanted(request: Request) -> int:
    return request.token_ids[: request.num_prompt_tokens].tolist().count(7)


@pytest.fixture
def lamps(monkeypatch: pytest.MonkeyPatch) -> Lamps:
    """Three lamps, in every scheduler that the test makes."""
    lamps, standard = Lamps(3), step_log.standard_resources
    monkeypatch.setattr(step_log, "standard_resources", lambda *arguments: [*standard(*arguments), lamps])
    return lamps


def test_a_request_that_could_never_hold_enough_is_refused(lamps: Lamps) -> None:
    harness = Harness()
    request_id = harness.add([7, 7, 7, 7])
    assert harness.records[request_id].finish_reason is FinishReason.ERROR
    assert not harness.engine.has_work


def test_a_request_waits_with_a_reason_until_another_gives_back(lamps: Lamps) -> None:
    harness = Harness(num_pages=40)
    first, second, third = harness.add([7, 7, 1], 3), harness.add([7, 7, 2], 3), harness.add([3], 3)
    harness.step()
    assert lamps.held == {first: 2}
    assert harness.scheduler.explain(second) == "needs 2 lamps, 1 of 3 are left"
    assert harness.scheduler.explain(third).startswith("1 ahead of it; the first: needs 2 lamps")
    assert harness.kv.num_pinned == 1, "what it had taken before its lamps went back"
    assert harness.scheduler.state.rows.num_free == 3
    harness.drain()
    assert lamps.held == {}


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_gives_back_at_the_commit_of_the_last_launched_step(lamps: Lamps, depth: int) -> None:
    harness = Harness(depth=depth)
    request_id = harness.add([7, 1, 2], 8)
    for _ in range(3):
        harness.step()
    is_launched = bool(harness.scheduler.in_flight)
    harness.abort(request_id)
    assert lamps.held == ({request_id: 1} if is_launched else {})
    harness.drain()
    assert lamps.held == {}


def test_random_requests_with_preemptions_lose_no_lamp(lamps: Lamps) -> None:
    """The harness checks the invariants of all resources after every step, and every answer."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(10):
        harness = Harness(Settings(admission="optimistic", depth=rng.choice([1, 2]), drafts=rng.choice([0, 4])))
        for _ in range(12):
            prompt = [rng.choice([1, 2, 7]) for _ in range(rng.randint(1, 8))]
            harness.add(prompt, rng.randint(1, 12))
            for _ in range(rng.randrange(4) if harness.engine.has_work else 0):
                harness.step()
        harness.drain()
        assert lamps.held == {}


def test_a_resource_is_asked_by_the_hooks_alone_that_it_overrides() -> None:
    resources = Resources([Lamps(1), Resource()])
    assert [type(one) for one in resources.acquire] == [Lamps]
    assert not resources.limit and not resources.schedule and not resources.plan_fields and not resources.begin_step
