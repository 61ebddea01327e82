"""Which platform a `--device` means."""

from __future__ import annotations

from tokenmill.errors import InvalidConfig
from tokenmill.platform.cpu import CpuPlatform
from tokenmill.platform.protocol import Platform


def select_platform(device: str) -> Platform:
    """The platform of a device.

    Raises:
        InvalidConfig: a device that this version does not run on.
    """
    if device in ("cpu", "auto"):
        return CpuPlatform()
    raise InvalidConfig(f"--device {device} is not supported; choose cpu")
