"""The choice of a platform by `--device`. Imports torch only where a GPU may be."""

from __future__ import annotations

from tokenmill.core.errors import InvalidConfig
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.platform.protocol import Platform
from tokenmill.platform.torch_package import has_torch, may_have_gpu, missing_torch


def select_platform(device: str) -> Platform:
    """Return the platform of a device: `cpu`, `cuda`, `cuda:1`, or `auto`, which is a GPU where there is one and torch
    too; `auto:1` is that of the second engine, a GPU of its own where there is any.

    Raises:
        InvalidConfig: no such device, or not on this machine, or it needs torch, which is not installed.
    """
    kind, _, index = device.partition(":")
    if device == "cpu":
        return CpuPlatform()
    if kind not in ("auto", "cuda") or not (index.isdigit() or device == kind):
        raise InvalidConfig(f"--device {device} is not supported; choose auto, cpu, cuda, or cuda:1 and so on")
    if kind == "cuda" and not has_torch():
        raise missing_torch(f"--device {device}", "gpu", "--device cpu does without")
    if kind == "auto" and not (may_have_gpu() and has_torch()):
        return CpuPlatform()
    from tokenmill.platform import cuda

    if kind == "auto" and not cuda.is_available():
        return CpuPlatform()
    return cuda.CudaPlatform(int(index or 0))
