"""KV pages as pieces of host memory: sent and received without a copy between, or copied and checked in one pass.

A page is a piece of each layer of each tensor of a KV cache. Its checksum is the CRC-32C of all its bytes, tensor by
tensor and layer by layer; where the native kernels were not built it is zlib's CRC-32, and pages go between two engines
only if both have the same.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.model.kernels.native import load_kernels

# See `Way` in native/pages.h.
_NONE, _OUT, _IN = 0, 1, 2


class HostPages:
    """The tensors of a KV cache in host memory, page by page.

    Attributes:
        page_bytes: bytes of a page over all tensors and layers.
        checksum: the kind of checksum that its pages get.
    """

    def __init__(self, parts: Sequence[npt.NDArray[Any]], is_native: bool = True) -> None:
        """Describe the tensors of a KV cache.

        Args:
            parts: each [layers, pages, ...] and contiguous; they are written through.
            is_native: False: use the reference, even if the native kernels were built.
        """
        self._parts: list[tuple[memoryview, int, int, int]] = []
        described = []
        for part in parts:
            assert part.flags.c_contiguous, "a page of each layer must be one piece of memory"
            layers, pages = part.shape[:2]
            size = math.prod(part.shape[2:]) * part.itemsize
            self._parts.append((memoryview(part.reshape(-1).view(np.uint8).data), layers, pages * size, size))
            described.append((part.ctypes.data, layers, pages * size, size))
        self.num_pages = min(part.shape[1] for part in parts)
        self.page_bytes = sum(layers * size for _, layers, _, size in self._parts)
        self._described = np.array(described, dtype=np.int64)
        self._native = load_kernels(threads=1) if is_native else None
        self.checksum = "crc32" if self._native is None else "crc32c"

    def pieces(self, page: int) -> list[memoryview]:
        """Return the pieces of memory that make up a page."""
        return [
            memory[start + page * size : start + (page + 1) * size]
            for memory, layers, step, size in self._parts
            for start in range(0, layers * step, step)
        ]

    def checksums(self, pages: Sequence[int]) -> list[int]:
        """Return the checksum of each page."""
        if self._native is not None:
            return self._copy(pages, None, _NONE)
        found = []
        for page in pages:
            value = 0
            for piece in self.pieces(page):
                value = zlib.crc32(piece, value)
            found.append(value)
        return found

    def copy_out(self, pages: Sequence[int], data: memoryview) -> list[int]:
        """Copy pages to `data` [len(pages) * page_bytes], one after another; return their checksums."""
        if self._native is not None:
            return self._copy(pages, data, _OUT)
        start = 0
        for page in pages:
            for piece in self.pieces(page):
                data[start : start + len(piece)] = piece
                start += len(piece)
        return self.checksums(pages)

    def copy_in(self, pages: Sequence[int], data: memoryview) -> list[int]:
        """Copy pages from `data`, the reverse of `copy_out`; return the checksums of what has been written."""
        if self._native is not None:
            return self._copy(pages, data, _IN)
        start = 0
        for page in pages:
            for piece in self.pieces(page):
                piece[:] = data[start : start + len(piece)]
                start += len(piece)
        return self.checksums(pages)

    def _copy(self, pages: Sequence[int], data: memoryview | None, way: int) -> list[int]:
        assert self._native is not None, "there are native kernels"
        ids = np.array(pages, dtype=np.int64)
        assert len(ids) == 0 or 0 <= ids.min() <= ids.max() < self.num_pages, f"pages outside 0..{self.num_pages - 1}"
        assert data is None or len(data) == len(ids) * self.page_bytes, "data is as long as the pages"
        checksums = np.empty(len(ids), dtype=np.uint32)
        address = 0 if data is None else np.frombuffer(data, np.uint8).ctypes.data
        parts = self._described
        self._native.copy_pages(
            parts.ctypes.data, len(parts), ids.ctypes.data, len(ids), address, checksums.ctypes.data, way
        )
        found: list[int] = checksums.tolist()
        return found
