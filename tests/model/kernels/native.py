"""The native kernels under test: every instruction set that this build and this machine have."""

from __future__ import annotations

import pytest

from tokenmill.model.kernels.native import load_kernels

native = pytest.importorskip("tokenmill._native", reason="the native kernels are not built")
ISAS = native.available_isas()
BEST = ISAS[-1:]
every_isa = pytest.mark.parametrize("isa", ISAS)


def kernels(isa: str, threads: int = 1):
    """Kernels of one level; more threads than cores are fine."""
    found = load_kernels(threads, isa)
    assert found is not None
    assert found.isa == isa
    return found
