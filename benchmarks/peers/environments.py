"""A virtual environment for each engine, made once from the package index: the pins of `requirements/NAME.txt`."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# Ignored by git and removed by `make clean`.
BUILD = HERE.parents[1] / "build" / "peers"
PIP = "pip==26.3"


def python_of(environment: str) -> Path:
    """The interpreter of an environment, which is made first where it is missing or its pins have changed.

    The empty name is the environment that runs this: that of TokenMill.

    Raises:
        subprocess.CalledProcessError: pip failed; its output has been shown.
    """
    if not environment:
        return Path(sys.executable)
    pins = HERE / "requirements" / f"{environment}.txt"
    folder = BUILD / "venvs" / environment
    python = folder / "bin" / "python"
    stamp = folder / f".made-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    if not stamp.exists():
        print(f"making {folder.relative_to(BUILD)} (minutes; llama.cpp is compiled)", file=sys.stderr)
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        _run(str(python), "-m", "pip", "install", "--quiet", PIP)
        _run(str(python), "-m", "pip", "install", "--no-deps", "--requirement", str(pins))
        stamp.touch()
    return python


def _run(*command: str) -> None:
    # One compiler at a time: llama.cpp's files are large.
    variables = {"CMAKE_BUILD_PARALLEL_LEVEL": "1", **_compilers(), **os.environ}
    subprocess.run(command, check=True, env=variables, stdout=sys.stderr)


def _compilers() -> dict[str, str]:
    """A Clang that knows AMX, where there is one.

    GCC 12 moves stores past its intrinsic that loads a tile configuration: the llama.cpp 0.3.36 that it compiles dies
    at its first product of integers on a processor with AMX. Clang 14 leaves AMX out.
    """
    for version in range(22, 15, -1):
        if shutil.which(f"clang++-{version}"):
            return {"CC": f"clang-{version}", "CXX": f"clang++-{version}"}
    return {}
