"""`RawPages`: a page mover over KV memory of the host. Bytes go as they lie, whatever the layout says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch


def layout_of(tensors: Sequence[torch.Tensor], name: str) -> tuple[str, int]:
    """What tells pages of some KV memory from those of another, and the bytes of one.

    Args:
        tensors: each [layers, pages, ...]; those of a draft model too.
        name: of how numbers lie in them; shapes and types are added to it.
    """
    kinds = [f"{tensor.dtype} {tensor.shape[0]} {list(tensor.shape[2:])}" for tensor in tensors]
    num_bytes = sum(tensor.nbytes // tensor.shape[1] for tensor in tensors)
    return blake2b("/".join([name, *kinds]).encode(), digest_size=16).hexdigest(), num_bytes


class RawPages:
    """See `PageMover`. A page is the pieces of its tensors, one tensor after the other, layer by layer."""

    def __init__(self, tensors: Sequence[torch.Tensor], layout: str) -> None:
        """`tensors`, `layout`: see `layout_of`; they are contiguous, in the memory of the host."""
        self.layout, self.page_bytes = layout_of(tensors, layout)
        self._parts = []
        start = 0
        for tensor in tensors:
            assert tensor.is_contiguous() and tensor.device.type == "cpu", "KV memory is one piece, of the host"
            size = math.prod(tensor.shape[2:]) * tensor.element_size()
            self._parts.append((tensor.view(torch.uint8).numpy().reshape(*tensor.shape[:2], size), start))
            start += tensor.shape[0] * size

    def read(self, page: int, data: memoryview) -> None:
        """See `PageMover`."""
        into = np.frombuffer(data, dtype=np.uint8)
        for part, start in self._parts:
            layers, _, size = part.shape
            into[start : start + layers * size].reshape(layers, size)[:] = part[:, page]

    def write(self, page: int, data: memoryview) -> None:
        """See `PageMover`."""
        source = np.frombuffer(data, dtype=np.uint8)
        for part, start in self._parts:
            layers, _, size = part.shape
            part[:, page] = source[start : start + layers * size].reshape(layers, size)
