"""Start Python children that run installed code only, wherever the user stands when the server is started.

Python looks for modules in the current folder first, so a `resource.py` in a folder that the user has unpacked would
run. Every child of this package is started here, and `tests/house` forbids any other way. A folder that the user
names on PYTHONPATH is looked into as always: plug-ins are found there.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
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
