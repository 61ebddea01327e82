"""The choice of a platform by `--device`."""

from __future__ import annotations

from tokenmill.core.errors import InvalidConfig
from tokenmill.platform import cuda
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.platform.protocol import Platform


def select_platform(device: str) -> Platform:
    """Return the platform of a device: `cpu`, `cuda`, `cuda:1`, or `auto`, which is a GPU where there is one; `auto:1`
    is that of the second engine, a GPU of its own where there is any.

    Raises:
        InvalidConfig: no such device, or not on this machine.
    """
    kind, _, index = device.partition(":")
    has_index = index.isdigit() or device == kind
    if device == "cpu" or (kind == "auto" and has_index and not cuda.is_available()):
        return CpuPlatform()
    if kind in ("auto", "cuda") and has_index:
        return cuda.CudaPlatform(int(index or 0))
    raise InvalidConfig(f"--device {device} is not supported; choose auto, cpu, cuda, or cuda:1 and so on")
