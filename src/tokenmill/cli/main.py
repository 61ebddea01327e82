"""`tokenmill VERB ...`: find the verb's file, run it, and turn errors into one sentence and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from tokenmill.core.errors import TokenMillError
from tokenmill.core.version import VERSION
from tokenmill.ipc.standard_streams import lossy, reopen_closed

VERBS = {
    "serve": "serve a model over HTTP, OpenAI-compatible",
    "run": "chat with a model or answer a prompt; starts a server in the background where none serves it",
    "ps": "list your running servers on this machine",
    "stop": "end running servers",
    "chat": "talk to a model in the terminal",
    "complete": "complete one prompt",
    "generate": "run a JSONL file of prompts offline",
    "embed": "turn a JSONL file of texts into vectors, offline",
    "bench": "measure throughput, latency, or a server under load",
    "proxy": "let one server compute prompts and another go on from there",
    "session": "keep a server's conversation with its KV as a file, and go on from there, elsewhere too",
    "launch": "start a coding agent (claude, codex, opencode, qwen, aider) against a running server",
    "top": "watch a running server: requests, pages, tokens per second",
    "estimate": "estimate a model's memory and speed on this machine, before loading it",
    "doctor": "check this machine: what it has, what is used, and what to mend",
    "pull": "download a model of the hub, with a bar; continue where it stopped",
    "show": "show what a model is: family, size, context, formats, what its template can do",
    "list": "list the models of the hub that are in the cache",
    "rm": "delete models from the cache",
    "simulate": "simulate a trace: real scheduler, cache and router, no model",
    "plan": "find the load that engines carry, or the engines that a load needs, by simulation",
    "fit": "fit the time of a step to step logs, for simulate and plan",
    "replay": "replay a recorded schedule, or compare other policies with it",
    "steps": "print or export a step log",
    "completion": "print completion of verbs and flags for bash, zsh or fish",
    "version": "print the versions of what is installed",
}
EXIT_INTERRUPTED = 130
# A disk that takes nothing more, or is broken.
_UNWRITABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0, 1 (it failed), 2 (wrong usage), 130 (Ctrl-C).
    """
    if argv is not None:
        return _run(list(argv))
    reopen_closed()
    sys.path[:] = without_current_folder(sys.path, os.environ.get("PYTHONPATH", ""))
    with lossy("stderr"):
        return _run(sys.argv[1:])


def _run(arguments: list[str]) -> int:
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except TokenMillError as error:
        print(f"tokenmill: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        _drop_output()
        return 1
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        print(f"tokenmill: {error.filename or 'the output'} cannot be written: {error.strerror}", file=sys.stderr)
        _drop_output()
        return 1
    return code


def _drop_output() -> None:
    """Drop the rest of stdout: Python would try to write it once more at exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    verb = arguments[0] if arguments else "--help"
    if verb in ("-h", "--help", "help"):
        print(_help())
        return 0
    if verb in ("-V", "--version"):
        print(VERSION)
        return 0
    if verb not in VERBS:
        from tokenmill.core.names import did_you_mean

        print(
            f"tokenmill: unknown verb {verb!r} (tokenmill --help lists the verbs){did_you_mean(verb, VERBS)}",
            file=sys.stderr,
        )
        return 2
    run = importlib.import_module(f"tokenmill.cli.{verb}").run
    return int(run(arguments[1:]))


def _help() -> str:
    lines = [
        f"TokenMill {VERSION}: an LLM inference and serving engine",
        "",
        "usage: tokenmill VERB ...",
        "",
        *(f"  {verb:<12}{purpose}" for verb, purpose in VERBS.items()),
        "",
        "tokenmill VERB --help lists a verb's flags. tokenmill serve, without a model, serves the bundled demo model.",
    ]
    return "\n".join(lines)


def without_current_folder(path: Sequence[str], python_path: str) -> list[str]:
    """Return `sys.path` without the current folder, if only an empty entry of PYTHONPATH has put it there.

    `PYTHONPATH=$PYTHONPATH:/plugins` has such an entry if the variable was unset. A folder that PYTHONPATH names, and
    one behind the standard library, which was installed there, stays.
    """
    entries = python_path.split(os.pathsep)
    if not python_path or "" not in entries:
        return list(path)
    try:
        folder = os.getcwd()
    except OSError:
        return list(path)  # it has been removed, so nothing can be in it
    standard_library = os.path.dirname(os.__file__)
    front = list(path).index(standard_library) if standard_library in path else 0
    if folder in (os.path.abspath(entry) for entry in entries if entry):
        return list(path)
    return [entry for entry in path[:front] if entry != folder] + list(path[front:])
