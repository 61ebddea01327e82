"""`DevicePages`: the page mover of an accelerator, which copies pages as they are, in any layout."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from tokenmill.engine.transfer.orders import write_one_by_one
from tokenmill.platform.protocol import Platform


class DevicePages:
    """A page mover that copies on a stream of its own, beside the step that runs; only the caller waits.

    A save reads what a committed step has written, and a load writes what steps launched after its event will read.
    So no stream has to wait for another.
    """

    def __init__(self, platform: Platform, pieces: Sequence[torch.Tensor], layout: str) -> None:
        """`pieces`, `layout`: see `RawPages`, but on the device."""
        self.layout = layout
        self.page_bytes = sum(piece.nbytes // piece.shape[1] for piece in pieces)
        self._pieces = tuple(pieces)
        self._stream = platform.stream()
        self._pinned = platform.pinned(self.page_bytes)
        # One page at a time: all threads share the pinned memory.
        self._lock = threading.Lock()
        self._places = []
        start = 0
        for piece in pieces:
            size = piece[:, 0].numel() * piece.element_size()
            self._places.append(self._pinned[start : start + size].view(piece.dtype).view(piece[:, 0].shape))
            start += size

    def read(self, page: int, data: memoryview) -> None:
        """Copy a page from the device to `data`, and wait until it is there."""
        with self._lock, torch.inference_mode():
            with self._stream:
                for piece, place in zip(self._pieces, self._places, strict=True):
                    place.copy_(piece[:, page], non_blocking=True)
                copied = self._stream.record()
            copied.wait()
            np.frombuffer(data, dtype=np.uint8)[:] = self._pinned.numpy()

    def write_good(self, pages: Sequence[int], data: memoryview, checksums: Sequence[int]) -> int:
        """Fill pages on the device as long as their bytes have these checksums; return how many have."""
        return write_one_by_one(self, pages, data, checksums)

    def write(self, page: int, data: memoryview) -> None:
        """Fill a page on the device with `data`, and wait until it is there."""
        with self._lock, torch.inference_mode():
            self._pinned.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
            with self._stream:
                for piece, place in zip(self._pieces, self._places, strict=True):
                    piece[:, page].copy_(place, non_blocking=True)
                copied = self._stream.record()
            copied.wait()
