"""Signs of life and stacks of other processes."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import zmq

from tokenmill.core.messages import ToApi
from tokenmill.core.part_messages import Beat
from tokenmill.ipc.channels import API, Inbox
from tokenmill.ipc.heartbeat import IDLE_BEATS, Heartbeat
from tokenmill.ipc.stack_dump import ask_for_stacks, own_stacks

CHILD = """
import sys, time
from pathlib import Path
from tokenmill.ipc.stack_dump import offer_stacks

def sleeps_here():
    print("ready", flush=True)
    time.sleep(600)

offer_stacks(Path(sys.argv[1]))
sleeps_here()
"""


def loop_inbox() -> SimpleNamespace:
    return SimpleNamespace(name="engine", num_dropped=3)


def test_it_beats_beside_a_loop_and_says_what_that_is_busy_with(tmp_path):
    context = zmq.Context()
    inbox = Inbox(context, tmp_path, API, ToApi)
    with Heartbeat(context, tmp_path, loop_inbox(), timeout=30, interval=0.01) as heartbeat:

        def next_beat(condition) -> Beat:
            while True:
                assert inbox.socket.poll(10_000)
                beat = inbox.receive()
                if beat is not None and condition(beat):
                    return beat

        assert next_beat(lambda beat: True) == Beat(part="engine", num_dropped=3)
        heartbeat.begin_job("a step")
        beat = next_beat(lambda beat: beat.seconds > 0.03)
        assert (beat.part, beat.job, beat.limit) == ("engine", "a step", 30)
        heartbeat.rest()
        next_beat(lambda beat: not beat.job)
    assert not any(thread.name == "heartbeat" for thread in threading.enumerate())
    inbox.close()
    context.term()


def test_a_loop_without_jobs_rests_and_beats_again_once_it_has_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenmill.ipc.heartbeat.REST_SECONDS", 0.05)
    context = zmq.Context()
    inbox = Inbox(context, tmp_path, API, ToApi)
    with Heartbeat(context, tmp_path, loop_inbox(), timeout=30, interval=0.001) as heartbeat:
        beats = []
        while not beats or not beats[-1].rests:
            assert inbox.socket.poll(10_000)
            beats.append(inbox.receive())
        assert [beat.rests for beat in beats] == [False] * (IDLE_BEATS - 1) + [True]
        assert not inbox.socket.poll(300), "it says so once"
        heartbeat.begin_job("a step")
        assert inbox.socket.poll(10_000)
        beat = inbox.receive()
        assert (beat.job, beat.rests) == ("a step", False)
    inbox.close()
    context.term()


def test_the_job_that_is_most_overdue_is_told():
    heartbeat = Heartbeat(zmq.Context.instance(), None, loop_inbox(), timeout=10)
    heartbeat.begin_job("a long text", patience=4, thread="lane")
    heartbeat.begin_job("a message")
    assert (heartbeat.beat().job, heartbeat.beat().limit) == ("a message", 10)
    heartbeat.rest()
    assert (heartbeat.beat().job, heartbeat.beat().limit) == ("a long text", 40)


def stop(child: subprocess.Popen) -> None:
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)  # a signal takes its time


def test_another_process_shows_its_stack_unless_it_is_stopped(tmp_path):
    path = tmp_path / "engine.stacks"
    assert asyncio.run(ask_for_stacks(path, 0)) == "it cannot show its stack yet"
    with subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            for _ in range(2):
                stacks = asyncio.run(ask_for_stacks(path, child.pid))
                assert stacks.count("in sleeps_here") == 1
            stop(child)
            assert f"kill -CONT {child.pid}" in asyncio.run(ask_for_stacks(path, child.pid))
        finally:
            child.kill()


BUSY_CHILD = """
import sys, threading, time
from pathlib import Path
from tokenmill.ipc.stack_dump import offer_stacks

def deep(left):
    return deep(left - 1) + 1 if left else 0

def works_here():
    while True:
        deep(400)

for _ in range(3):
    threading.Thread(target=works_here, daemon=True).start()
offer_stacks(Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
"""


def test_showing_stacks_does_no_harm_to_threads_that_run(tmp_path):
    """Deep calls give memory back as they return; a walk of such a stack from a signal's handler ends the process."""
    path = tmp_path / "engine.stacks"
    with subprocess.Popen([sys.executable, "-c", BUSY_CHILD, str(path)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "ready\n"
            for _ in range(10):
                assert re.search("in (deep|works_here)", asyncio.run(ask_for_stacks(path, child.pid)))
            stop(child)
            assert "kill -CONT" in asyncio.run(ask_for_stacks(path, child.pid))
            child.send_signal(signal.SIGCONT)
            assert re.search("in (deep|works_here)", asyncio.run(ask_for_stacks(path, child.pid)))
            assert child.poll() is None
        finally:
            child.kill()


def test_a_process_sees_its_own_stacks():
    assert "test_a_process_sees_its_own_stacks" in own_stacks()
