"""Launch kernels that begin before the one in front has ended (programmatic dependent launch), where a GPU can."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class _Switch:
    """Switches launches of this kind on where a GPU can; `--no-pdl` turns them off for the whole process."""

    is_on = True


def dependent(x: torch.Tensor) -> dict[str, bool]:
    """Return launch options on x's device for a kernel with the constant `PDL` in which each program calls `follow`."""
    return {"PDL": True, "launch_pdl": True} if x.is_cuda and _Switch.is_on and _is_possible() else {"PDL": False}


def is_on_gpu(x: torch.Tensor) -> bool:
    """Return whether x has memory of a GPU: kernels are compiled for it, not interpreted."""
    return x.device.type not in ("cpu", "meta")


def allow_dependent(is_allowed: bool) -> None:
    """Allow or forbid such launches in this process, before its first one."""
    _Switch.is_on = is_allowed


@triton.jit
def follow(PDL: tl.constexpr):
    """Wait for all kernels in front, before touching their inputs and outputs; then let the next kernel begin.

    Because every program waits, the end of a kernel tells the next one that those before it have ended too.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@cache
def _is_possible() -> bool:
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)
