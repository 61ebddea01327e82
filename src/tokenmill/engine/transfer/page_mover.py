"""`RawPages`: the page mover of the host, which copies pages as they are, in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from tokenmill.engine.transfer.checksum import find_checksum
from tokenmill.engine.transfer.host_pages import HostPages
from tokenmill.engine.transfer.orders import write_one_by_one
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


def _kind(array: Array) -> str:
    """Return the name of an array's dtype, the same for a tensor; the host keeps bfloat16 as its bits."""
    return str(array.dtype).removeprefix("torch.").replace("uint16", "bfloat16")


class RawPages(HostPages):
    """A page mover over host memory. A page is its part of each piece, one after another, layer by layer."""

    def __init__(self, pieces: Sequence[Array], layout: str) -> None:
        """`pieces`: see `KVCache`; in host memory. `layout`: see `layout_of`."""
        super().__init__([host_array(piece) for piece in pieces])
        self.layout = layout
        self._has_checksum = self.checksum == find_checksum()[0]

    def read(self, page: int, data: memoryview) -> None:
        """Copy a page to `data`."""
        self.copy_out([page], data)

    def write(self, page: int, data: memoryview) -> None:
        """Fill a page with `data`."""
        self.copy_in([page], data)

    def write_good(self, pages: Sequence[int], data: memoryview, checksums: Sequence[int]) -> int:
        """Copy pages and check them in one pass: all are filled; return how many are right, from the first on."""
        if not self._has_checksum:
            return write_one_by_one(self, pages, data, checksums)
        found = self.copy_in(pages, data)
        return next((i for i, wanted in enumerate(checksums) if found[i] != wanted), len(found))
