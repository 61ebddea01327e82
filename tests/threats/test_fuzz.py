"""The short form of `make fuzz`: odd bodies for all routes, drawn anew in each run."""

import random

import pytest

from tests.seeding import seed_for
from tests.threats.fuzz import LEFT_OUT, Findings, Stalls, fuzz, start
from tests.threats.odd_bodies import MIB, OddRequest, OddRequests

NUM_BODIES = 150


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with start(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


@pytest.fixture
def document(server):
    return server.http.get(f"{server.url}/openapi.json").json()


def test_no_odd_body_makes_a_server_error_or_goes_unanswered(server, document):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    findings = fuzz(server, OddRequests(document, random.Random(seed), 2 * MIB, LEFT_OUT), NUM_BODIES)
    assert findings.failures == []
    assert findings.statuses.total() == NUM_BODIES
    assert {200, 400} <= findings.statuses.keys()
    assert "Traceback" not in server.output(), server.output()[-3000:]


def test_all_routes_are_drawn_and_the_same_seed_draws_the_same(document):
    drawn = [[OddRequests(document, random.Random(7), MIB, LEFT_OUT).draw() for _ in range(1)] for _ in range(2)]
    assert drawn[0] == drawn[1]
    requests = OddRequests(document, random.Random(seed_for(__name__)), MIB // 16, LEFT_OUT)
    seen = {requests.draw().what.split(":")[0] for _ in range(4000)}
    everything = {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
        if path not in LEFT_OUT
    }
    assert seen == everything


def test_a_server_error_and_silence_are_failures_and_a_busy_server_is_none():
    findings = Findings()
    request = OddRequest("POST", "/x", "a request")
    for status, stall in ((200, 0.001), (503, 0.5), (507, 0.002), (500, 0.003), (0, 0.0), (502, 0.001)):
        findings.note(request, status, stall)
    assert [failure.split(":")[0] for failure in findings.failures] == ["500", "0", "502"]
    assert findings.worst == (0.5, "a request (0 bytes)")


def test_a_loop_that_stands_still_is_noticed(tmp_path):
    class Told:
        log = tmp_path / "log"

    Told.log.write_text("STALL 0.0040\nanother line\nSTALL 1.5000\n")
    stalls = Stalls(Told)
    assert stalls.longest() == 1.5
    assert stalls.longest() == 0.0
    with Told.log.open("a") as log:
        log.write("STALL 0.0200\n")
    assert stalls.longest() == 0.02
