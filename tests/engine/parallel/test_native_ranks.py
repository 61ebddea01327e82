"""Check the waits of ranks: none is lost or overtaken, and every wait ends, whatever happens to the others."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.parallel import peer
from tests.engine.parallel.peer import PAGE, SLOTS
from tests.tiers import scaled
from tokenmill.model.kernels.native import MODULE, load_kernels

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

OVER, TIMEOUT, GIVEN_UP, GONE = range(4)
CORES = len(os.sched_getaffinity(0))


class Ring:
    """Memory that ranks share, and peers that are told what to do with it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("test-ranks")
        os.ftruncate(self.descriptor, 16 * PAGE)
        self.memory = peer.memory_of(self.descriptor)
        self.numbers = self.memory[PAGE : PAGE + 8 * size].view(np.int64)
        self.slots = self.memory[2 * PAGE : 2 * PAGE + 8 * SLOTS].view(np.int64)
        self.peers: list[subprocess.Popen[str]] = []

    def start(self, work: str, count: int = 1) -> None:
        """Start a peer for each rank but 0."""
        module = importlib.import_module(MODULE).__file__
        assert module is not None, "it lies in a file"
        for rank in range(1, self.size):
            arguments = [str(Path(peer.__file__)), str(self.descriptor), str(rank), str(self.size), work, str(count)]
            self.peers.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    stdout=subprocess.PIPE,
                    text=True,
                    pass_fds=[self.descriptor],
                    env={**os.environ, "TOKENMILL_NATIVE": module},
                )
            )
        assert [self.line(one) for one in self.peers] == ["ready"] * len(self.peers)

    def join(self, timeout: float = 20.0, spin: float = 0.0) -> Any:
        """Be rank 0, and notice when a peer is gone."""
        descriptors = [os.pidfd_open(one.pid) for one in self.peers]
        return importlib.import_module(MODULE).Ranks(self.memory.ctypes.data, 0, self.size, spin, timeout, descriptors)

    def line(self, one: subprocess.Popen[str]) -> str:
        """Return the next line of a peer."""
        assert one.stdout is not None, "it is a pipe"
        return one.stdout.readline().strip()


@contextlib.contextmanager
def ring_of(size: int) -> Iterator[Ring]:
    """A ring whose peers are gone afterwards."""
    ring = Ring(size)
    try:
        yield ring
    finally:
        for one in ring.peers:
            one.kill()
            one.wait(10)
            assert one.stdout is not None, "it is a pipe"
            one.stdout.close()
        os.close(ring.descriptor)


@pytest.mark.parametrize("spin", [0.0, 50e-6])
def test_thousands_of_meetings_of_twice_as_many_ranks_as_cores(spin: float) -> None:
    count = scaled(30_000) if spin == 0.0 else 2_000
    with ring_of(2 * CORES) as ring:
        ring.start("meet", count)
        assert peer.meet_often(ring.join(spin=spin), ring.numbers, 0, count) == "met"
        assert [ring.line(one) for one in ring.peers] == ["met"] * (ring.size - 1)


def test_every_rank_reads_every_message_in_order_and_none_is_overwritten_before() -> None:
    count = 20_000
    with ring_of(CORES + 2) as ring:
        ring.start("read", count)
        ranks = ring.join()
        for number in range(count):
            assert ranks.wait_taken(SLOTS - 1) == OVER
            ring.slots[number % SLOTS] = number
            ranks.post()
        assert ranks.wait_taken(0) == OVER
        assert [ring.line(one) for one in ring.peers] == ["read"] * (ring.size - 1)


def test_a_rank_that_does_not_read_stops_the_writer_when_the_ring_is_full() -> None:
    with ring_of(2) as ring:
        ring.start("meet", 2)  # it reads nothing
        ranks = ring.join(timeout=0.2)
        for _ in range(SLOTS):
            assert ranks.wait_taken(SLOTS - 1) == OVER
            ranks.post()
        assert ranks.wait_taken(SLOTS - 1) == TIMEOUT


def test_a_rank_that_is_killed_is_missed_long_before_the_deadline() -> None:
    with ring_of(3) as ring:
        ring.start("meet", 1_000_000)
        ranks = ring.join(timeout=60.0)
        for turn in range(1, 50):
            ring.numbers[0] = turn
            assert ranks.meet(60.0) == OVER
        ring.peers[1].send_signal(signal.SIGKILL)
        ring.peers[1].wait(10)
        while (outcome := ranks.meet(60.0)) == OVER:
            ring.numbers[0] += 1
        assert outcome == GONE, "not that the time was up"


def test_a_rank_that_stands_still_is_waited_for_until_the_deadline_and_no_longer() -> None:
    with ring_of(2) as ring:
        ring.start("meet", 1_000_000)
        ranks = ring.join()
        assert ranks.meet(20.0) == OVER
        ring.peers[0].send_signal(signal.SIGSTOP)
        # It may have come to a meeting or two before it stopped.
        outcomes = [ranks.meet(0.3) for _ in range(3)]
        assert outcomes[-1] == TIMEOUT


def test_nobody_waits_for_one_that_gave_up() -> None:
    with ring_of(2) as ring:
        ring.start("give up")
        ranks = ring.join(timeout=60.0)
        assert ranks.meet(60.0) == OVER
        assert ranks.meet(60.0) in (GIVEN_UP, GONE)
        ring.peers[0].wait(10)
        assert ranks.rank_that_gave_up == 1
        assert ranks.meet(60.0) == GIVEN_UP


def test_the_first_that_gives_up_is_the_one_that_is_named() -> None:
    with ring_of(3) as ring:
        alone = ring.join()
        alone.give_up()
        other = importlib.import_module(MODULE).Ranks(ring.memory.ctypes.data, 2, 3, 0.0, 1.0, [])
        other.give_up()
        assert alone.rank_that_gave_up == other.rank_that_gave_up == 0
