"""A machine with as much memory as a test says, and a model to which that matters."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import make_checkpoint
from tokenmill.platform.cpu import CpuPlatform


class Machine(CpuPlatform):
    """A CPU with so many free bytes."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def available_bytes(self) -> int:
        return self.free


def make_six_mib(folder: Path) -> Path:
    """A checkpoint of some 6 MiB in bfloat16, more than the header that is read of it."""
    return make_checkpoint(folder, hidden_size=256, intermediate_size=1024, num_hidden_layers=3)
