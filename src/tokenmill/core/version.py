"""The versions of TokenMill and of the software it runs on: the first lines of a bug report."""

from __future__ import annotations

VERSION = "0.1.0"
PACKAGES = ("torch", "numpy", "tokenizers", "starlette", "uvicorn", "pyzmq", "msgspec")


def versions() -> dict[str, str]:
    """Return name -> version of TokenMill, Python, the machine and the packages that matter in a bug report."""
    import importlib.metadata
    import platform

    machine = f"{platform.system()} {platform.machine()}"
    found = {"tokenmill": VERSION, "python": platform.python_version(), "machine": machine}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
