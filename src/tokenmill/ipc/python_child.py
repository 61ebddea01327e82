"""Start Python children that run installed code only, wherever the user stands when the server is started.

Python looks for modules in the current folder first, so a `resource.py` in a folder that the user has unpacked would
run. Every child of this package is started here, and `tests/house` forbids any other way. A folder that the user
names on PYTHONPATH is looked into as always: plug-ins are found there.
"""

from __future__ import annotations

import gc
import os
import site
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn


def python_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of a Python child: `arguments` are what follows `python -P -s`.

    -P keeps the current folder off the path, -s the user's own site folder, unless this package is installed there.
    """
    return [sys.executable, "-P", *(() if _is_installed_for_user() else ("-s",)), *arguments]


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a Python child: that of this process over `more`, safe for grandchildren too.

    An empty entry of PYTHONPATH (`PYTHONPATH=$PYTHONPATH:/plugins` where it was unset) means the current folder in
    spite of -P, and is left out.
    """
    environment = {**(more or {}), **os.environ, "PYTHONSAFEPATH": "1"}
    if not _is_installed_for_user():
        environment["PYTHONNOUSERSITE"] = "1"
    entries = [entry for entry in environment.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    if entries:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment


def start_python(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a Python child in a session of its own: Ctrl-C reaches only its parent, which decides.

    Args:
        arguments: `-m`, a module and what it is given.
        environment: defaults for variables that this process has not.
        options: further ones of `subprocess.Popen`, such as pipes.
    """
    return subprocess.Popen(
        python_command(arguments), env=child_environment(environment), start_new_session=True, **options
    )


def fork_python(
    module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a Python child as a copy of this process: it has imported all that this one has, and shares that memory.

    Else it is like one that `start_python` starts, and is started that way where a copy would not be safe: where this
    process has threads, or on other systems than Linux.

    Args:
        module: what `python -m` would run. arguments: of it.
        environment, options: see `start_python`.
    """
    command = ["-m", module, *arguments]
    if sys.platform != "linux" or len(os.listdir("/proc/self/task")) > 1:
        return start_python(command, environment, **options)
    command = python_command(command)
    # Popen forks, moves the pipes to their places, and waits until the child has executed another program or has
    # closed its descriptors. This one does the latter.
    become = partial(_become, module, command, arguments, environment or {})
    return subprocess.Popen(
        command,
        preexec_fn=become,  # noqa: PLW1509 (there are no threads)
        restore_signals=False,
        start_new_session=True,
        **options,
    )


def _become(module: str, command: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run a module as `__main__` in this fork, and end with its exit code. What the parent was amid never goes on."""
    import runpy

    from setproctitle import setproctitle, setthreadtitle

    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    code = 1
    try:
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            setattr(sys, name, open(number, "w" if number else "r", 1, errors="backslashreplace", closefd=False))  # noqa: SIM115
        setproctitle(" ".join(command))
        setthreadtitle(Path(command[0]).name)
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        if not _is_installed_for_user():
            sys.path[:] = [entry for entry in sys.path if entry != site.getusersitepackages()]
        sys.argv = [module, *arguments]
        gc.enable()  # Popen has disabled it
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_python(arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a Python child to its end; `options` are those of `subprocess.run`."""
    return subprocess.run(python_command(arguments), env=child_environment(), check=True, **options)


def run_program(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program of the user in the foreground, with further variables; return its exit code."""
    return subprocess.run(command, env={**os.environ, **environment}, check=False).returncode


def become_python(arguments: Sequence[str]) -> NoReturn:
    """Let a Python child take the place of this process."""
    command = python_command(arguments)
    os.execve(command[0], command, child_environment())


def _is_installed_for_user() -> bool:
    if not site.ENABLE_USER_SITE or (folder := site.getusersitepackages()) not in sys.path:
        return False
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return Path(str(distribution("tokenmill").locate_file(""))) == Path(folder)
    except PackageNotFoundError:
        return False
