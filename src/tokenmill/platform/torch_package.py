"""torch, as a package that may be missing: whether it is there, and the sentence that says who needs it.

Does not import it. A decoder with native kernels does without; GPUs, images and reference kernels do not.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from tokenmill.core.errors import InvalidConfig

# What the drivers of GPUs leave in /dev: NVIDIA's, its Tegras', those of Windows' subsystem for Linux, and AMD's.
GPU_FILES = ("nvidia[0-9]*", "nvidiactl", "nvhost-gpu", "dxg", "kfd")


def has_torch() -> bool:
    """Return True if torch can be imported, without importing it."""
    return importlib.util.find_spec("torch") is not None


def needs_package(package: str, extra: str) -> str:
    """Say, behind a subject, that it needs a package that is not installed, and which extra of this one brings it."""
    return f"needs {package}, which is not installed (pip install 'tokenmill[{extra}]')"


def missing_torch(wish: str, extra: str = "torch", instead: str = "") -> InvalidConfig:
    """Return the error that says how to install torch.

    Args:
        wish: what needs it.
        extra: of this package, which brings it.
        instead: what does without; "": nothing.
    """
    other = f"; {instead}" if instead else ""
    return InvalidConfig(f"{wish} {needs_package('torch', extra)}{other}")


def may_have_gpu(root: Path = Path("/")) -> bool:
    """Return False if the machine surely has no GPU: a second of importing torch is saved, and its memory.

    Args:
        root: the folder of /dev; tests give one of their own.
    """
    if sys.platform == "darwin":
        return False
    return sys.platform == "win32" or any(next((root / "dev").glob(name), None) is not None for name in GPU_FILES)
