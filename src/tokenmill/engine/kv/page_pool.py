"""The pool of page ids. A page is free, or owned by exactly one owner: a request or the radix tree."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.core.errors import InvalidConfig

# Page 0, in every pool and in the memory of every KV cache.
RESERVED_PAGES = 1


class PagePool:
    """Ids `1 .. num_pages - 1` on a stack; page 0 is reserved: padding tokens are written there.

    Sharing is the radix tree's business (path locks), so a page needs no reference count of its own.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise InvalidConfig(f"a KV cache has a reserved page and at least one more; this one has {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))
        self._is_free = bytearray([0] + [1] * (num_pages - 1))

    @property
    def num_usable(self) -> int:
        """Number of pages that can ever be allocated."""
        return self.num_pages - RESERVED_PAGES

    @property
    def num_free(self) -> int:
        """Number of pages that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has checked that they are free."""
        assert count <= len(self._free), f"allocating {count} of {len(self._free)} free pages"
        if count == 0:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. The first one given is the last one allocated again, so pass a sequence's tail first."""
        for page in pages:
            assert 0 < page < self.num_pages and not self._is_free[page], f"page {page} is not allocated"
            self._is_free[page] = 1
            self._free.append(page)

    def check_invariants(self) -> None:
        """Raise AssertionError unless exactly the pages marked free are on the free list, without page 0."""
        assert len(set(self._free)) == len(self._free), "a page is on the free list twice"
        assert sum(self._is_free) == len(self._free), "free marks and free list disagree"
        assert all(self._is_free[page] for page in self._free), "a page on the free list is not marked free"
        assert not self._is_free[0], "the reserved page was freed"
