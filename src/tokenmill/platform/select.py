"""The choice of a platform by `--device`."""

from __future__ import annotations

import ctypes
import importlib.util
from types import ModuleType

from tokenmill.core.errors import InvalidConfig
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
    if device != "cpu" and not (kind in ("auto", "cuda") and has_index):
        raise InvalidConfig(f"--device {device} is not supported; choose auto, cpu, cuda, or cuda:1 and so on")
    if device == "cpu" or (kind == "auto" and not has_gpu()):
        return CpuPlatform()
    platform: Platform = _cuda(device).CudaPlatform(int(index or 0))
    return platform


def has_gpu() -> bool:
    """Return True if there is a GPU that torch can use. Without a driver torch is not asked, which takes a second."""
    return _has_driver() and importlib.util.find_spec("torch") is not None and _cuda("auto").is_available()


def _has_driver() -> bool:
    """Return True if the driver of a GPU is on this machine, under the name it has on Linux or on Windows."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


def _cuda(device: str) -> ModuleType:
    """Import the platform that needs torch.

    Raises:
        InvalidConfig: torch is not installed.
    """
    try:
        from tokenmill.platform import cuda
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InvalidConfig(
            f"--device {device} needs torch, which is not installed: pip install tokenmill[gpu], or use --device cpu"
        ) from error
    return cuda
