"""`tokenmill version`: what is installed, read from package metadata so that nothing is imported."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence

from tokenmill import __version__
from tokenmill.config.parser import Parser

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "fastapi", "uvicorn", "pyzmq", "msgspec")


def run(arguments: Sequence[str]) -> int:
    """Print one `name version` pair per line."""
    make_parser().parse(arguments)
    for name, version in versions().items():
        print(f"{name:<12} {version}")
    return 0


def make_parser() -> Parser:
    """The parser of `version`."""
    return Parser("version", "Print the versions of what is installed.")


def versions() -> dict[str, str]:
    """Name -> version of TokenMill, Python, the machine and the packages that matter in a bug report."""
    found = {"tokenmill": __version__, "python": platform.python_version(), "machine": _machine()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}"
