"""Load the native extension module, if it was built for this machine. Only the machine's side imports this file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill._native import Kernels

MODULE = "tokenmill._native"


def load_kernels(threads: int, isa: str = "") -> Kernels | None:
    """Return the native kernels of this machine's best instruction set; None if none were built or none fit.

    Args:
        threads: number of threads that a kernel may use, at least 1.
        isa: the level to take instead of the best one; tests run through all of them.

    Raises:
        ValueError: a named level that this machine or this build does not have.
    """
    try:
        native = importlib.import_module(MODULE)
    except ImportError:
        return None
    if not native.available_isas():
        return None
    return native.Kernels(isa, threads)


def available_levels() -> list[str] | None:
    """Return the instruction sets that both this machine and this build have, best last; None if nothing was built."""
    try:
        native = importlib.import_module(MODULE)
    except ImportError:
        return None
    return list(native.available_isas())
