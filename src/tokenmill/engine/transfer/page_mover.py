"""`RawPages`: a page mover over KV memory of the host. It copies bytes as they are, in any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch


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
