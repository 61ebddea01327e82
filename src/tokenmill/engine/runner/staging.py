"""Send host arrays to a device: packed into pinned memory, copied in one piece beside the step that runs.

A ring of slots. A slot is filled again only when the step that used it is done: steps are committed in order and few
are in flight, so with more slots than steps in flight the host never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.model.attention.row_extension import Arrays, Sent
from tokenmill.platform.protocol import Event, Platform, Stream

NUM_SLOTS = 3
# What a device likes its tensors to begin at.
ALIGNMENT = 16
SMALLEST = 1 << 16


class _Slot:
    """Pinned memory, as much on the device, and the event behind the last step that used them."""

    def __init__(self) -> None:
        self.pinned = torch.empty(0, dtype=torch.uint8)
        self.device = self.pinned
        self.results = self.pinned
        self.num_fetched = 0
        self.used: Event | None = None


class Staging:
    """A `Transport` that sends the arrays of a step, and holds the memory that its results come back to.

    Args:
        compute: the stream of the steps; it waits for the copies, the host does not.
        num_slots: one more than there are steps in flight.
    """

    def __init__(self, platform: Platform, compute: Stream, num_slots: int = NUM_SLOTS) -> None:
        self._platform = platform
        self._compute = compute
        self._copies = platform.stream()
        self._slots = [_Slot() for _ in range(num_slots)]
        self._current = 0

    def send(self, arrays: Arrays) -> Sent:
        """Begin a step: return its arrays on the device, valid until as many steps later as there are slots."""
        self._current = (self._current + 1) % len(self._slots)
        slot = self._slots[self._current]
        if slot.used is not None:
            slot.used.wait()
        slot.num_fetched = 0
        places, size = _places(arrays)
        if size > len(slot.pinned):
            size = 1 << max(size - 1, SMALLEST - 1).bit_length()
            slot.pinned = self._platform.pinned(size)
            slot.device = torch.empty(size, dtype=torch.uint8, device=self._platform.device)
        host = slot.pinned.numpy()
        for name, values in arrays.items():
            start = places[name]
            host[start : start + values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        with self._copies:
            slot.device[:size].copy_(slot.pinned[:size], non_blocking=True)
        # Also what guards the slot if its step is never finished.
        slot.used = self._copies.record()
        self._compute.wait_for(slot.used)
        return {name: _view(slot.device, places[name], values) for name, values in arrays.items()}

    def __enter__(self) -> Self:
        self._compute.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._compute.__exit__(*error)

    def fetch(self, *tensors: torch.Tensor) -> Sequence[npt.NDArray[Any]]:
        """Begin to copy eight-byte numbers to the host, on the compute stream, in one copy behind those of before."""
        slot = self._slots[self._current]
        words = [tensor.flatten().view(torch.int64) for tensor in tensors]
        packed = words[0] if len(words) == 1 else torch.cat(words)
        start = slot.num_fetched
        if start + packed.nbytes > len(slot.results):
            # What was fetched before keeps the memory that it came to.
            start, slot.results = 0, self._platform.pinned(max(start + packed.nbytes, SMALLEST))
        slot.num_fetched = start + packed.nbytes
        results = slot.results[start : slot.num_fetched].view(torch.int64)
        results.copy_(packed, non_blocking=True)
        parts = results.split([len(own) for own in words])
        return [part.view(tensor.dtype).view(tensor.shape).numpy() for part, tensor in zip(parts, tensors, strict=True)]

    def finish_step(self) -> Event:
        """Return the event on the compute stream behind all of the step's work."""
        event = self._compute.record()
        self._slots[self._current].used = event
        return event


def _places(arrays: Arrays) -> tuple[dict[str, int], int]:
    """Return where each array begins, and the bytes of all."""
    places, size = {}, 0
    for name, values in arrays.items():
        places[name] = size
        size += -(-values.nbytes // ALIGNMENT) * ALIGNMENT
    return places, size


def _view(memory: torch.Tensor, start: int, like: npt.NDArray[Any]) -> torch.Tensor:
    dtype = torch.from_numpy(np.empty(0, dtype=like.dtype)).dtype
    return memory[start : start + like.nbytes].view(dtype).view(like.shape)
