"""Choose the connection that gives way, keep places, and measure silence."""

import math

import pytest

from tokenmill.config.configs import ServerConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.serving.server.http.connections import REPORT_SECONDS, SWEEP_SECONDS, Connections, SilenceLimits
from tokenmill.serving.server.http.descriptors import SPARE, num_connections


class Fake:
    """A connection that notes what happens to it."""

    def __init__(self, name):
        self.name = name
        self.due = math.inf
        self.happened = ""

    def time_out(self):
        self.happened += "timed out "
        self.due = math.inf

    def give_way(self):
        self.happened += "gave way "


@pytest.fixture
def lines():
    return []


@pytest.fixture
def connections(lines):
    """Room for 8, of which 6 may have requests."""
    return Connections(SilenceLimits(head=10, body=30, idle=75), 8, lines.append)


def enter(connections, count):
    found = [Fake(number) for number in range(count)]
    for one in found:
        connections.enter(one)
    return found


def pass_time(connections, seconds):
    for _ in range(math.ceil(seconds / SWEEP_SECONDS)):
        connections.sweep(SWEEP_SECONDS)


def test_the_one_that_is_silent_longest_gives_way(connections):
    found = enter(connections, 8)
    connections.admit_request(found[0])
    connections.expect_request(found[1], 75)  # it has had an answer since the others came
    enter(connections, 6)
    assert [one.name for one in found if one.happened == "gave way "] == [2, 3, 4, 5, 6, 7]
    enter(connections, 1)
    assert found[1].happened == "gave way "
    assert found[0].happened == "", "it has a request"
    assert len(connections) == 8


def test_some_places_are_kept_from_requests(connections):
    found = enter(connections, 8)
    assert [connections.admit_request(one) for one in found] == [True] * 6 + [False] * 2
    (newcomer,) = enter(connections, 1)
    assert found[6].happened == "gave way "
    assert not connections.admit_request(newcomer)
    assert connections.admit_request(found[0]), "the next request of a connection that has one takes no other place"
    connections.expect_request(found[0], 75)
    assert connections.admit_request(newcomer), "an answer frees one"


def test_silence_has_its_time(connections):
    silent, busy, slow = enter(connections, 3)
    connections.admit_request(busy)
    connections.admit_request(slow)
    slow.due = connections.now + 30
    pass_time(connections, 9)
    assert silent.happened == ""
    pass_time(connections, 2)
    assert silent.happened == "timed out "
    assert slow.happened == ""
    pass_time(connections, 1000)
    assert (slow.happened, busy.happened) == ("timed out ", "")


def test_while_the_server_is_stopped_nobody_is_silent(connections):
    (one,) = enter(connections, 1)
    connections.sweep(3600.0)
    assert one.happened == ""
    assert connections.now <= 2 * SWEEP_SECONDS


def test_what_is_closed_is_forgotten(connections):
    first, second = enter(connections, 2)
    connections.leave(first)
    connections.expect_request(first, 10)
    pass_time(connections, 20)
    assert (first.happened, second.happened) == ("", "timed out ")
    assert len(connections) == 1


def test_refusals_are_told_once_a_minute(connections, lines):
    enter(connections, 100)
    assert len(lines) == 1
    assert "8 connections are open" in lines[0]
    pass_time(connections, REPORT_SECONDS - 1)
    enter(connections, 1)
    assert len(lines) == 1
    pass_time(connections, 2)
    connections.note_refused("no more")
    assert lines[1:] == ["connections: no more; 93 refused since the last such line"]


def test_connections_leave_descriptors_for_others(monkeypatch):
    monkeypatch.setattr("tokenmill.serving.server.http.descriptors.resource.getrlimit", lambda _: (256, 256))
    monkeypatch.setattr("tokenmill.serving.server.http.descriptors.os.listdir", lambda _: list(range(50)))
    assert num_connections() == 256 - 50 - SPARE
    monkeypatch.setattr("tokenmill.serving.server.http.descriptors.os.listdir", lambda _: list(range(250)))
    assert num_connections() > 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("name", ["head_timeout", "body_timeout", "keep_alive_timeout"])
def test_a_limit_that_nobody_could_keep_is_refused(name, seconds):
    with pytest.raises(InvalidConfig, match=f"--{name.replace('_', '-')} must be "):
        ServerConfig(**{name: seconds}).resolve()
