"""A stream that never raises and never waits: what cannot be written is counted, and the rest is written whole."""

import contextlib
import io
import os
import pty
import random
import socket
import subprocess
import sys
import threading
import tty

import pytest

from tests.eventually import join
from tests.full_disk import room_for
from tests.seeding import seed_for
from tokenmill.ipc.standard_streams import LossyStream, lossy, num_lost_lines

SEED = seed_for(__name__)
END = "#"


@pytest.fixture
def rng():
    print(f"seed {SEED}")
    return random.Random(SEED)


def random_lines(rng: random.Random, count: int, longest: int) -> list[str]:
    """Lines that differ; only a whole one ends with `END`."""
    sizes = [rng.choice((0, rng.randrange(100), rng.randrange(longest))) for _ in range(count)]
    return [f"{number} {'ä' * size}{END}" for number, size in enumerate(sizes)]


def say(stream: LossyStream, lines: list[str]) -> None:
    """Print them in another thread, which comes back."""
    thread = threading.Thread(target=lambda: [print(line, file=stream, flush=True) for line in lines], daemon=True)
    thread.start()
    join(thread)
    assert not thread.is_alive(), "a writer waits"


def whole(heard: str) -> list[str]:
    return [line for line in heard.replace("\r", "").split("\n") if line.endswith(END)]


class Drained:
    """Reads a descriptor to its end."""

    def __init__(self, descriptor: int) -> None:
        self.heard = b""
        self.thread = threading.Thread(target=self.read, args=(descriptor,), daemon=True)
        self.thread.start()

    def read(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):  # how a terminal ends
            while data := os.read(descriptor, 1 << 16):
                self.heard += data

    def lines(self) -> list[str]:
        join(self.thread)
        return whole(self.heard.decode(errors="replace"))


def a_pipe():
    return os.pipe()


def a_terminal():
    reader, writer = pty.openpty()
    tty.setraw(writer)
    return reader, writer


def a_socket():
    reader, writer = socket.socketpair()
    return reader.detach(), writer.detach()


@pytest.mark.parametrize("make", [a_pipe, a_terminal, a_socket])
def test_whoever_does_not_read_makes_nobody_wait_and_hears_whole_lines_later(make, rng):
    reader, writer = make()
    with os.fdopen(writer, "w", encoding="utf-8") as output:
        stream = LossyStream(output)
        first = random_lines(rng, 400, 9000)
        say(stream, first)
        lost = stream.num_lost
        assert lost > 0
        drained = Drained(reader)
        later: list[str] = []
        while stream.num_lost > lost or not later:  # until something has been read
            lost = stream.num_lost
            later += [f"later {len(later)}{END}"]
            say(stream, later[-1:])
        assert os.get_blocking(writer), "whoever else has it did not ask for that"
        num_lost = stream.num_lost
        stream.close()
    heard = drained.lines()
    assert set(heard) <= {*first, *later}
    assert heard[-1] == later[-1]
    assert len(heard) + num_lost == len(first) + len(later)


def ended() -> io.TextIOBase:
    reader, writer = os.pipe()
    output = os.fdopen(writer, "w")
    os.close(reader)
    return output


def full() -> io.TextIOBase:
    return open("/dev/full", "w")


def closed() -> io.TextIOBase:
    output = open(os.devnull, "w")  # noqa: SIM115
    output.close()
    return output


def closed_below() -> io.TextIOBase:
    reader, writer = os.pipe()
    output = io.TextIOWrapper(io.FileIO(writer, "w", closefd=False))
    os.close(writer)
    os.close(reader)
    return output


@pytest.mark.parametrize("make", [ended, full, closed, closed_below, lambda: None])
def test_each_line_that_nobody_can_take_is_counted(make, rng):
    output = make()
    stream = LossyStream(output)
    lines = random_lines(rng, 50, 20_000)
    say(stream, lines)
    print("half a line", end="", file=stream, flush=True)
    assert stream.num_lost == 51
    assert stream.write("") == 0
    if output is not None and not output.closed:
        with contextlib.suppress(OSError):
            output.close()


@pytest.mark.parametrize("mode", ["w", "a"])
def test_a_disk_that_is_full_for_a_while_cuts_one_line_and_no_other(tmp_path, rng, mode):
    for number in range(20):
        path = tmp_path / f"{number}.log"
        lines, later = random_lines(rng, 30, 300), [f"later {END}", f"and later {END}"]
        with path.open(mode, encoding="utf-8") as output:
            stream = LossyStream(output)
            with room_for(rng.randrange(sum(len(line.encode()) + 1 for line in lines))):
                say(stream, lines)
            num_lost = stream.num_lost
            assert num_lost
            say(stream, later)
        heard = whole(path.read_text(encoding="utf-8", errors="replace"))
        assert heard == lines[: len(heard) - 2] + later
        assert len(heard) + num_lost == len(lines) + 2


def test_a_stream_without_a_descriptor_gets_all():
    output = io.StringIO()
    say(LossyStream(output), ["a", "\ud800", "b"])
    assert output.getvalue() == "a\n\\ud800\nb\n"


def test_inside_nothing_raises_and_outside_all_is_as_before(monkeypatch):
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        with lossy("stderr"), lossy("stdout", "stderr"):
            print("nobody hears this", file=sys.stderr)
            assert num_lost_lines() == 1
        assert sys.stderr is full


CLOSED = """
import os, sys
from tests.full_disk import room_for
from tokenmill.ipc.standard_streams import reopen_closed
reopen_closed()
opened = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
print("to nowhere")
print("to nowhere", file=sys.stderr, flush=True)
sys.stdout.flush()
os.write(opened, f"{opened} {sys.stdin.read()!r} {[os.get_inheritable(number) for number in range(3)]}".encode())
"""


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", "<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_what_was_closed_at_the_start_goes_nowhere_and_never_into_a_file(tmp_path, closed):
    script = f'"$0" -c "$1" "$2" </dev/null >/dev/null 2>/dev/null {closed}'
    subprocess.run(["sh", "-c", script, sys.executable, CLOSED, str(tmp_path / "file")], check=True, timeout=60)
    number, rest = (tmp_path / "file").read_text().split(" ", 1)
    assert int(number) > 2
    assert rest == "'' [True, True, True]"
