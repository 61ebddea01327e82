"""`WindowTables`: the pages of the window group that loads fill and saves read; each has a table there, like a request.

    pages of a load       |<- of the match ->|<------------- loaded ------------->|
    of the window group                                    |<- window - 1 before ->|

A hit needs the pages of `window - 1` tokens before its end, so no others are loaded. A save is of the same pages before
three ends: where what is new begins, since another request may part there, the end of the prompt, and the newest page.

A load is promised what its request will hold once it runs. A save comes behind requests: it reads pages that were set
aside for saves and those that are not promised to anybody; where there are none, the prefix is stored without them.
Knows no source; the same calls give the same tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from tokenmill.core.request import Request
from tokenmill.engine.kv.kv_manager import CachedPages, KVManager
from tokenmill.engine.kv.radix_node import PageArray
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.kv.window_pages import WindowPages
from tokenmill.engine.scheduler.resources.resource import Resource
from tokenmill.engine.scheduler.resources.windows import Windows
from tokenmill.engine.transfer.page_copies import PageCopies


class WindowTables:
    """Opens and closes the tables of loads and saves in a window group.

    Args:
        copies: of cached pages, by steps, which read pages of the group that may be another's by now.
    """

    def __init__(self, kv: KVManager, pages: WindowPages, copies: PageCopies | None = None) -> None:
        self.pages = pages
        self._copies = copies
        self._is_saved = np.zeros(len(pages.beside), dtype=bool)  # by full page, that beside it
        self._num_saving = 0  # pages without a promise
        self._saving: dict[int, list[tuple[str, int, PageArray]]] = {}  # by save: table, its pages without a promise
        kv.on_cached.append(self._cached)

    @classmethod
    def over(cls, kv: KVManager, resources: Sequence[Resource]) -> Self | None:
        """Return the tables over the window group of a scheduler with these resources; None: it has no such group."""
        windows = next((one for one in resources if isinstance(one, Windows)), None)
        copies = next((one for one in resources if isinstance(one, PageCopies)), None)
        return None if windows is None else cls(kv, windows.pages, copies)

    def reason_to_wait(self, num_pages: int, spare: int) -> str:
        """Return why a request cannot load `num_pages` full pages yet, or ""."""
        if self._copies is not None and self._copies.reads_windows:
            return "waiting to load KV: launched steps read window pages that the load may be given"
        needed, left = self.pages.num_wanted(num_pages), self.pages.num_left
        if not needed or needed + spare <= left:
            return ""
        return f"needs {needed} window pages to load KV into, {max(0, left - spare)} are unreserved"

    def begin_load(self, request: Request, match: PrefixMatch, num_pages: int) -> list[int]:
        """Return the pages to be filled for the last of `num_pages` full pages, of which the first ones match."""
        num_tokens = num_pages * self.pages.page_size
        self.pages.open(request.id, match.pages, num_pages, num_tokens)
        first, _ = self.pages.cover(request.id, num_tokens)
        return [self.pages.page_at(request.id, number) for number in range(max(first, len(match.pages)), num_pages)]

    def end_load(self, request: Request) -> None:
        """Close the table of a load: what the prefix cache has of it stays there."""
        self.pages.close(request.id)

    def _cached(self, cached: CachedPages) -> None:
        """Mark the pages beside those that are new in the prefix cache as unsaved."""
        self._is_saved[cached.pages[cached.num_known :]] = False

    def begin_save(self, save_id: int, full_pages: PageArray, first: int, prompt: int) -> list[tuple[int, int]]:
        """Let the pages stay that hits need at three ends of a locked path, as far as they are there and unsaved.

        Args:
            first: pages before the new ones. prompt: pages of the prompt; it counts if it ends among the new ones.

        Returns:
            For each the number of its full page, and its id.
        """
        found: list[tuple[int, int]] = []
        for end in sorted({first, min(max(first, prompt), len(full_pages)), len(full_pages)}):
            begin, depth = self._reached(full_pages[:end])
            numbers = begin + np.flatnonzero(~self._is_saved[full_pages[begin:depth]])
            if len(numbers) and self._open(save_id, full_pages[:depth], full_pages[numbers]):
                found += [(int(number), int(self.pages.beside[full_pages[number]])) for number in numbers]
        return found

    def begin_export(self, save_id: int, full_pages: PageArray, ends: Iterable[int]) -> dict[int, int]:
        """Do `begin_save` for a whole path, saved or not, at these ends of it, the most important one first."""
        found: dict[int, int] = {}
        for end in ends:
            begin, depth = self._reached(full_pages[:end])
            if begin < depth and self._open(save_id, full_pages[:depth], full_pages[:0]):
                found |= zip(range(begin, depth), self.pages.beside[full_pages[begin:depth]].tolist(), strict=True)
        return found

    def _reached(self, full_pages: PageArray) -> tuple[int, int]:
        """Return the first and the end of the pages that a request reads which begins behind as many as are a hit."""
        depth = self.pages.num_reached(full_pages)
        return self.pages.first_reached(depth * self.pages.page_size), depth

    def _open(self, save_id: int, path: PageArray, unsaved: PageArray) -> bool:
        count = min(len(path), self.pages.most_pages)
        is_set_aside = self.pages.is_ample or self._num_saving + count <= self.pages.num_for_saves
        if not is_set_aside and count > self.pages.num_left:
            return False
        tables = self._saving.setdefault(save_id, [])
        name, without = f"save {save_id}.{len(tables)}", count if is_set_aside else 0
        self.pages.open(name, path, 0 if is_set_aside else len(path), is_hit=False)
        tables.append((name, without, unsaved))
        self._num_saving += without
        self._is_saved[unsaved] = True
        return True

    def end_save(self, save_id: int, is_saved: bool) -> None:
        """Let go of the pages of a save."""
        for name, without, full_pages in self._saving.pop(save_id, ()):
            self._num_saving -= without
            self._is_saved[full_pages] &= is_saved
            self.pages.close(name)

    def check_invariants(self, requests: Iterable[str]) -> None:
        """Raise AssertionError if a table is of no request with a row, no load and no save, or counts are off.

        Args:
            requests: ids of those with a row or a load.
        """
        saves = [save for tables in self._saving.values() for save in tables]
        assert self.pages.users == {*requests, *(name for name, _, _ in saves)}, "a window table is lost"
        assert self._num_saving == sum(without for _, without, _ in saves), "pages of a save are lost"
        assert self.pages.is_ample or self._num_saving <= self.pages.num_for_saves, "saves read more than is theirs"
