"""Page movers, which copy pages as they are, in any layout: `RawPages` on the host, `DevicePages` on an accelerator."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch

from tokenmill.platform.protocol import Platform


def layout_of(tensors: Sequence[torch.Tensor], name: str) -> tuple[str, int]:
    """Return a name for the layout of pages in this KV memory, and the bytes of one page.

    Args:
        tensors: each [layers, pages, ...], including those of a draft model.
        name: name of the order of numbers in them; shapes and types are added to it.
    """
    kinds = [f"{tensor.dtype} {tensor.shape[0]} {list(tensor.shape[2:])}" for tensor in tensors]
    num_bytes = sum(tensor.nbytes // tensor.shape[1] for tensor in tensors)
    return blake2b("/".join([name, *kinds]).encode(), digest_size=16).hexdigest(), num_bytes


class RawPages:
    """A page mover over host memory. A page is the pieces of its tensors, one tensor after another, layer by layer."""

    def __init__(self, tensors: Sequence[torch.Tensor], layout: str) -> None:
        """`tensors`, `layout`: see `layout_of`; the tensors are contiguous, in host memory."""
        self.layout, self.page_bytes = layout_of(tensors, layout)
        self._parts = []
        start = 0
        for tensor in tensors:
            assert tensor.is_contiguous() and tensor.device.type == "cpu", "KV memory is one piece, of the host"
            size = math.prod(tensor.shape[2:]) * tensor.element_size()
            self._parts.append((tensor.view(torch.uint8).numpy().reshape(*tensor.shape[:2], size), start))
            start += tensor.shape[0] * size

    def read(self, page: int, data: memoryview) -> None:
        """Copy a page to `data`."""
        into = np.frombuffer(data, dtype=np.uint8)
        for part, start in self._parts:
            layers, _, size = part.shape
            into[start : start + layers * size].reshape(layers, size)[:] = part[:, page]

    def write(self, page: int, data: memoryview) -> None:
        """Fill a page with `data`."""
        source = np.frombuffer(data, dtype=np.uint8)
        for part, start in self._parts:
            layers, _, size = part.shape
            part[:, page] = source[start : start + layers * size].reshape(layers, size)


class DevicePages:
    """A page mover that copies on a stream of its own, beside the step that runs; only the caller waits.

    A save reads what a committed step has written, and a load writes what steps launched after its event will read.
    So no stream has to wait for another.
    """

    def __init__(self, platform: Platform, tensors: Sequence[torch.Tensor], layout: str) -> None:
        """`tensors`, `layout`: see `RawPages`, but on the device."""
        self.layout, self.page_bytes = layout_of(tensors, layout)
        self._tensors = tuple(tensors)
        self._stream = platform.stream()
        self._pinned = platform.pinned(self.page_bytes)
        # One page at a time: all threads share the pinned memory.
        self._lock = threading.Lock()
        self._places = []
        start = 0
        for tensor in tensors:
            size = tensor[:, 0].numel() * tensor.element_size()
            self._places.append(self._pinned[start : start + size].view(tensor.dtype).view(tensor[:, 0].shape))
            start += size

    def read(self, page: int, data: memoryview) -> None:
        """Copy a page from the device to `data`, and wait until it is there."""
        with self._lock, torch.inference_mode():
            with self._stream:
                for tensor, place in zip(self._tensors, self._places, strict=True):
                    place.copy_(tensor[:, page], non_blocking=True)
                copied = self._stream.record()
            copied.wait()
            np.frombuffer(data, dtype=np.uint8)[:] = self._pinned.numpy()

    def write(self, page: int, data: memoryview) -> None:
        """Fill a page on the device with `data`, and wait until it is there."""
        with self._lock, torch.inference_mode():
            self._pinned.numpy()[:] = np.frombuffer(data, dtype=np.uint8)
            with self._stream:
                for tensor, place in zip(self._tensors, self._places, strict=True):
                    tensor[:, page].copy_(place, non_blocking=True)
                copied = self._stream.record()
            copied.wait()
