"""Read the memory of a GPU, for `bandwidth`. Imported where there is one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenmill.platform.protocol import Platform


def read_device(platform: Platform, size: int) -> Callable[[], None]:
    """Return a function that reads so many bytes of a device's memory once, and waits until that is done."""
    stream = platform.stream()
    values = torch.ones(size // 4, dtype=torch.float32, device=platform.device)
    stream.record().wait()

    def read() -> None:
        with stream:
            values.sum()
        stream.record().wait()

    return read
