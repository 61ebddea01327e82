import asyncio
import errno
import time

from tests.eventually import eventually_async
from tokenmill.core.part_messages import Beat, Pong
from tokenmill.ipc.heartbeat import REST_SECONDS
from tokenmill.serving.replicas.hang_watch import TICK_SECONDS, HangWatch
from tokenmill.serving.replicas.health import SILENT_SECONDS, SILENT_START_SECONDS, PartHealth


def part(timeout=30.0) -> PartHealth:
    health = PartHealth("the engine", timeout)
    health.started()
    return health


def busy(seconds, limit=30.0) -> Beat:
    return Beat(part="engine", job="a step", seconds=seconds, limit=limit)


def test_silence_is_trouble_within_five_seconds_of_a_missed_beat():
    health = part()
    health.beats(Beat(part="engine"))
    health.pass_time(4)
    assert health.trouble is None
    health.pass_time(0.5)
    assert health.trouble == "the engine has not reported for 4 seconds"
    assert health.is_deaf
    health.beats(Beat(part="engine"))
    assert health.trouble is None
    assert not health.is_deaf


def test_a_part_that_starts_may_be_silent_for_longer():
    health = PartHealth("the engine", 30)
    health.pass_time(SILENT_START_SECONDS)
    assert health.trouble is None
    health.pass_time(1)
    assert health.trouble is not None
    health.started()
    assert health.trouble is None, "its beats are expected from now on"


def test_a_long_step_is_trouble_although_beats_come():
    health = part()
    health.beats(busy(30))
    assert health.trouble is None
    health.beats(busy(31))
    assert health.trouble == "the engine has been busy with a step for 31 seconds; 30 are allowed"
    assert not health.is_deaf, "it may still take messages, as far as this tells"
    health.beats(busy(0.1))
    assert health.trouble is None
    health.beats(busy(400, limit=600))
    assert health.trouble is None


def test_a_short_job_during_which_a_beat_went_out_is_no_trouble_until_the_next():
    health = part()
    health.beats(busy(0.001, limit=1))
    health.pass_time(1.5)
    assert health.trouble is None


def test_a_loop_that_takes_no_message_is_trouble():
    health = part(timeout=30)
    health.is_asked()
    for _ in range(35):
        assert health.trouble is None
        health.beats(Beat(part="engine"))
        health.pass_time(1)
    assert health.trouble == "the engine has taken no message for 35 seconds"
    assert health.is_lost
    health.answers()
    assert health.trouble is None
    health.pass_time(1)
    assert not health.waits_for_pong


def test_no_progress_is_trouble():
    health = part()
    health.note_stuck(True)
    assert health.trouble == "the engine makes no progress with the requests that it has"
    health.note_stuck(False)
    assert health.trouble is None


class Watched:
    """A watch over two parts that collects what it does."""

    def __init__(self, clock=time.monotonic):
        self.pinged, self.said, self.told = [], [], []
        self.watch = HangWatch(
            ping=self.pinged.append,
            stacks=self.stacks,
            say=lambda name, text: self.said.append((name, text)),
            on_tick=lambda name, part: self.told.append((name, part.is_deaf)),
            clock=clock,
        )
        for name in ("engine", "worker-0"):
            self.watch.parts[name] = PartHealth(f"the {name}", 30)

    async def stacks(self, name):
        return f"Thread 1\nstack of {name}"


def test_each_loop_is_asked_once_until_it_answers():
    watched = Watched()
    watched.watch.tick(0.5)
    assert watched.pinged == [], "nobody is asked before all are ready"
    watched.watch.started()
    watched.watch.tick(0.5)
    watched.watch.tick(0.5)
    assert watched.pinged == ["engine", "worker-0"]
    watched.watch.note_sign("worker-0", Pong("worker-0"))
    watched.watch.tick(0.5)
    assert watched.pinged == ["engine", "worker-0", "worker-0"]


def test_parts_that_rest_are_looked_at_seldom_and_known_to_live_by_their_answers():
    async def scenario():
        watched = Watched()
        watched.watch.started()
        assert not watched.watch._all_rest
        for name in ("engine", "worker-0"):
            watched.watch.note_sign(name, Beat(part=name, rests=True))
        assert watched.watch._all_rest
        for _ in range(20):
            watched.watch.tick(REST_SECONDS)
            assert not watched.watch._all_rest, "an answer is awaited at the usual pace"
            for name in ("engine", "worker-0"):
                watched.watch.note_sign(name, Pong(name))
            assert watched.watch._all_rest
        assert watched.watch.trouble is None
        watched.watch.tick(REST_SECONDS)
        watched.watch.note_sign("worker-0", Pong("worker-0"))
        watched.watch.tick(SILENT_SECONDS)
        assert watched.watch.trouble is None, "9 seconds are allowed"
        watched.watch.tick(TICK_SECONDS)
        assert watched.watch.trouble == "the engine has not reported for 10 seconds"
        watched.watch.note_sign("engine", Beat(part="engine", job="a step"))
        watched.watch.tick(SILENT_SECONDS + TICK_SECONDS)
        assert watched.watch.trouble == "the engine has not reported for 4 seconds", "beats are due again"

    asyncio.run(scenario())


class HeldUp:
    """A clock: between a look and the next so much passes as is drawn, more than any part may be silent."""

    def __init__(self, rng):
        self.stalls = rng.uniform(1, 60, size=25)
        self.num_asked = 0
        self.now = 0.0

    def __call__(self):
        self.num_asked += 1
        if self.num_asked % 2 == 0:
            self.now += self.stalls[min(self.num_asked // 2, len(self.stalls)) - 1]
        return self.now


def test_what_this_process_was_held_up_for_is_nobodys_silence(rng):
    async def scenario():
        clock = HeldUp(rng)
        watched = Watched(clock)
        watched.watch.started()
        running = asyncio.ensure_future(watched.watch.run())
        await eventually_async(lambda: clock.num_asked >= 2 * len(clock.stalls))
        running.cancel()
        assert len(watched.told) >= 8, "it goes on looking"
        assert clock.now > 60, "by the clock all of them have been silent for long"
        assert watched.watch.trouble is None
        assert watched.said == []

    asyncio.run(scenario())


def test_a_hang_is_one_line_with_the_stack_and_its_end_another():
    async def scenario():
        watched = Watched()
        watched.watch.started()
        for _ in range(12):
            watched.watch.note_sign("worker-0", Beat(part="worker-0"))
            watched.watch.tick(TICK_SECONDS)
            await asyncio.sleep(0)
        assert watched.watch.trouble == "the engine has not reported for 6 seconds"
        assert watched.told[-2:] == [("engine", True), ("worker-0", False)]
        watched.watch.note_sign("engine", Beat(part="engine"))
        watched.watch.tick(TICK_SECONDS)
        assert watched.said == [
            ("engine", "the engine has not reported for 4 seconds | Thread 1 | stack of engine"),
            ("engine", "the engine goes on"),
        ]
        assert watched.watch.trouble is None

    asyncio.run(scenario())


def test_a_part_whose_stacks_cannot_be_had_is_reported_all_the_same():
    async def no_stacks(name):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario():
        watched = Watched()
        watched.watch._stacks = no_stacks
        watched.watch.started()
        for _ in range(12):
            watched.watch.tick(TICK_SECONDS)
            await asyncio.sleep(0)
        assert watched.watch.has_reported("engine"), "so that it is killed"
        assert dict(watched.said)["engine"].endswith("its stacks cannot be read: No space left on device")

    asyncio.run(scenario())
