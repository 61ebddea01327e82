"""What the rest of the engine may ask of a device."""

from __future__ import annotations

from typing import Protocol


class Platform(Protocol):
    """A kind of device.

    Attributes:
        name: e.g. `cpu`.
        device: what torch calls it.
    """

    name: str
    device: str

    def available_bytes(self) -> int:
        """Memory that can still be taken, in bytes."""

    def num_threads(self) -> int:
        """Host threads that a step should use."""

    def set_num_threads(self, wanted: int | None = None) -> int:
        """Tell torch how many threads to use, `num_threads()` if it is left to us; returns the number."""
