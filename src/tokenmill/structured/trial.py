"""Compile a grammar where it can do no harm: in a process of its own with little time and memory.

    engine --(length, grammar)--> this process --fork--> child: compile, report the memory it took
    engine <--(a JSON line)------ this process <--------

The process loads the tokenizer once; each grammar gets a fork, so one that explodes takes only its fork with it. Time
is the fork's own CPU time: a busy machine fails no grammar.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
from typing import BinaryIO, NamedTuple

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.structured.compiler import GrammarCompiler, GrammarTokenizer

_LENGTH = struct.Struct(">I")
_SMALL = '{"grammars": [{"lark_grammar": "start: /[a-z]*/"}]}'
# When the process is stuck for reasons of the machine: far beyond any compile time that is configured.
_PATIENCE_SECONDS = 60.0


class Limits(msgspec.Struct, frozen=True):
    """What compiling one grammar may take."""

    cpu_seconds: float
    num_bytes: int


class Verdict(msgspec.Struct, omit_defaults=True):
    """The outcome: the memory that the compiled grammar takes, or why there is none."""

    num_bytes: int = 0
    error: str = ""


class Sandbox:
    """The engine's end. One thread uses it; the process starts with the first grammar."""

    def __init__(self, tokenizer: GrammarTokenizer, limits: Limits) -> None:
        self._arguments = [msgspec.json.encode(part).decode() for part in (tokenizer, limits)]
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, text: str) -> int:
        """Bytes that the compiled grammar takes.

        Raises:
            InvalidRequest: it cannot be compiled within the limits.
        """
        payload = text.encode()
        try:
            verdict = self._ask(_LENGTH.pack(len(payload)) + payload)
        except (OSError, ValueError):
            self.close()
            raise InvalidRequest("the grammar could not be compiled") from None
        if verdict.error:
            raise InvalidRequest(verdict.error)
        return verdict.num_bytes

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError), process:
                pass  # closes the pipes, of which one may be broken, and waits

    def _ask(self, message: bytes) -> Verdict:
        if self._process is None:
            command = [sys.executable, "-m", "tokenmill.structured.sandbox", *self._arguments]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both were asked for"
        stdin.write(message)
        stdin.flush()
        if not select.select([stdout], [], [], _PATIENCE_SECONDS)[0]:
            raise TimeoutError("no verdict")
        return msgspec.json.decode(stdout.readline(), type=Verdict)


def main() -> int:
    """Entry point of the process: judge grammars until standard input ends."""
    tokenizer = msgspec.json.decode(sys.argv[1], type=GrammarTokenizer)
    limits = msgspec.json.decode(sys.argv[2], type=Limits)
    compiler = GrammarCompiler(tokenizer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    while (text := _read_grammar(sys.stdin.buffer)) is not None:
        try:
            compiler.load()
            # What llguidance sets up with the first grammar is not the memory of those that follow.
            compiler.compile(_SMALL)
            verdict = _judge(compiler, text, limits)
        except InvalidRequest as error:
            verdict = Verdict(error=str(error))
        sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
        sys.stdout.buffer.flush()
    return 0


def _read_grammar(stream: BinaryIO) -> str | None:
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    return stream.read(_LENGTH.unpack(header)[0]).decode()


def _judge(compiler: GrammarCompiler, text: str, limits: Limits) -> Verdict:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _compile_and_exit(compiler, text, limits, write_end)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        report = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return Verdict(error=f"the grammar takes more than {limits.cpu_seconds:g} seconds to compile")
    if not report:
        return Verdict(error=f"the grammar takes more than {limits.num_bytes >> 20} MiB of memory to compile")
    return msgspec.json.decode(report, type=Verdict)


def _compile_and_exit(compiler: GrammarCompiler, text: str, limits: Limits, write_end: int) -> None:
    """The child's whole life. Ends without Python's own clean-up, which belongs to the parent."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the limit is not kept, and time alone bounds a grammar
        room = _memory().address_space + limits.num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    before = _memory().own
    with contextlib.suppress(BaseException):
        try:
            matcher = compiler.compile(text)
            verdict = Verdict(num_bytes=max(_memory().own - before, 0))
            del matcher
        except InvalidRequest as error:
            verdict = Verdict(error=str(error))
        os.write(write_end, msgspec.json.encode(verdict))
    os._exit(0)


class _Memory(NamedTuple):
    """Bytes of this process: all of its address space, and what is resident and not of a file."""

    address_space: int
    own: int


def _memory() -> _Memory:
    if sys.platform != "linux":
        return _Memory(0, 0)
    with open("/proc/self/statm", encoding="ascii") as file:
        size, resident, shared = map(int, file.read().split()[:3])
    return _Memory(size * resource.getpagesize(), (resident - shared) * resource.getpagesize())


if __name__ == "__main__":
    sys.exit(main())
