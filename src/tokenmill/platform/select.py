"""Which platform a `--device` means."""

from __future__ import annotations

from tokenmill.core.errors import InvalidConfig
from tokenmill.platform import cuda
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.platform.protocol import Platform


def select_platform(device: str) -> Platform:
    """The platform of a device: `cpu`, `cuda`, `cuda:1`, or `auto`, which is a GPU where there is one.

    Raises:
        InvalidConfig: no such device, or not on this machine.
    """
    if device == "auto":
        return cuda.CudaPlatform() if cuda.is_available() else CpuPlatform()
    if device == "cpu":
        return CpuPlatform()
    kind, _, index = device.partition(":")
    if kind == "cuda" and (index.isdigit() or device == "cuda"):
        return cuda.CudaPlatform(int(index or 0))
    raise InvalidConfig(f"--device {device} is not supported; choose auto, cpu, cuda, or cuda:1 and so on")
