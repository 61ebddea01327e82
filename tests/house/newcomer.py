"""A clean clone, as a newcomer has it, and the two terminals that README asks for.

Nothing is installed again: the clone's `.venv` borrows the packages of the interpreter that runs the tests, and its
`pip` only notes what it is called with. All else is what README prints: make, its recipes, the `tokenmill` command.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import site
import subprocess
import sys
import venv
from pathlib import Path

from tests.house.documents import Snippet
from tests.house.source_tree import ROOT

OUTER = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "MODEL", "PORT", "PYTHON", "VENV", "VIRTUAL_ENV")
# Stands before what each block prints.
MARK = "<<< block "
PIP = """import pathlib, sys
if sys.argv[1:] and "config" not in sys.argv:
    with open(pathlib.Path(sys.prefix, "pip-calls"), "a") as file:
        print(*sys.argv[1:], file=file)
"""


def clone(folder: Path) -> None:
    """Copy what git knows of this tree, uncommitted changes included, and the environment that make fills."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    native = importlib.util.find_spec("tokenmill._native")
    if native is not None and native.origin is not None:
        shutil.copy2(native.origin, folder / "src" / "tokenmill")
    _make_environment(folder)


def _make_environment(folder: Path) -> None:
    venv.create(folder / ".venv", with_pip=False, symlinks=True)
    binaries = folder / ".venv" / "bin"
    packages = next((folder / ".venv" / "lib").glob("python*/site-packages"))
    borrowed = [path for path in sys.path if path.endswith("site-packages")] or site.getsitepackages()
    (packages / "borrowed.pth").write_text("\n".join([str(folder / "src"), *borrowed]) + "\n")
    (packages / "pip").mkdir()
    # A package with this file is found before the borrowed one of its name.
    (packages / "pip" / "__init__.py").touch()
    (packages / "pip" / "__main__.py").write_text(PIP)
    for name, module in (("tokenmill", "tokenmill"), ("pip", "pip")):
        (binaries / name).write_text(f'#!/bin/sh\nexec "{binaries}/python" -m {module} "$@"\n')
        (binaries / name).chmod(0o755)


def pip_calls(folder: Path) -> list[str]:
    """Return the arguments of pip's calls in a clone, in order."""
    return (folder / ".venv" / "pip-calls").read_text().splitlines()


class Terminal:
    """A shell in the clone that runs what is pasted into it, one block after another, and stops at what fails."""

    def __init__(self, folder: Path, name: str, **variables: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key not in OUTER} | variables
        # Nothing of the environment that runs the tests is found but by the path that README says.
        own = str(Path(sys.executable).parent)
        environment["PATH"] = os.pathsep.join(p for p in environment["PATH"].split(os.pathsep) if p != own)
        self._folder = folder
        self._name = name
        self._environment = environment
        self.log = folder.with_name(f"{folder.name}-{name}.log")
        self._process: subprocess.Popen[str] | None = None

    def paste(self, snippets: list[Snippet], typed: str = "") -> None:
        """Run all of them in one shell; `typed` is what the newcomer types where a program asks."""
        lines = ["set -euo pipefail"]
        for snippet in snippets:
            lines.append(f"echo '{MARK}{snippet.number}'")
            is_python = snippet.language == "python"
            lines.append(f"python - <<'BLOCK'\n{snippet.text}BLOCK" if is_python else snippet.text.rstrip())
        script = self._folder.with_name(f"{self._folder.name}-{self._name}.sh")
        script.write_text("\n".join([*lines, f"echo '{MARK}end'"]) + "\n")
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                ["bash", str(script)],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        self._process.stdin.write(typed)
        self._process.stdin.close()

    def wait(self, seconds: float) -> str:
        """All that was printed, once the last block has ended well."""
        assert self._process is not None
        assert self._process.wait(seconds) == 0, self.text()
        return self.text()

    def text(self) -> str:
        """Return the output so far."""
        return self.log.read_text(errors="replace")

    def has_ended(self) -> bool:
        """Return True if its shell is gone."""
        return self._process is None or self._process.poll() is not None

    def interrupt(self, seconds: float = 20.0) -> None:
        """Ctrl-C, then the end of the shell."""
        if self._process is not None and not self.has_ended():
            os.killpg(self._process.pid, signal.SIGINT)
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
