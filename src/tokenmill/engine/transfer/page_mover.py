"""`RawPages`: the page mover of the host, which copies pages as they are, in any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.platform.host_arrays import host_array

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array


def layout_of(arrays: Sequence[Array], name: str) -> str:
    """Return a name for the layout of pages in this KV memory; layer-first and page-first have the same.

    Args:
        arrays: each [layers, pages, ...], including those of a draft model.
        name: name of the order of numbers in them; shapes and types are added to it.
    """
    kinds = [f"{_kind(array)} {array.shape[0]} {list(array.shape[2:])}" for array in arrays]
    return blake2b("/".join([name, *kinds]).encode(), digest_size=16).hexdigest()


def page_bytes_of(pieces: Sequence[Array]) -> int:
    """Return the bytes of a page in KV memory of these pieces."""
    return sum(piece.nbytes // piece.shape[1] for piece in pieces)


def _kind(array: Array) -> str:
    """Return the name of an array's dtype, the same for a tensor; the host keeps bfloat16 as its bits."""
    return str(array.dtype).removeprefix("torch.").replace("uint16", "bfloat16")


class RawPages:
    """A page mover over host memory. A page is its part of each piece, one after another, layer by layer."""

    def __init__(self, pieces: Sequence[Array], layout: str) -> None:
        """`pieces`: see `KVCache`; in host memory. `layout`: see `layout_of`."""
        self.layout, self.page_bytes = layout, page_bytes_of(pieces)
        self._parts = []
        start = 0
        for array in map(host_array, pieces):
            assert array.flags.c_contiguous, "KV memory is one piece"
            layers, pages = array.shape[:2]
            size = math.prod(array.shape[2:]) * array.itemsize
            self._parts.append((array.reshape(-1).view(np.uint8).reshape(layers, pages, size), start))
            start += layers * size

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
