"""`Room`: compare what waiting requests would take, one after the other, with the free rows and pages of each group."""

from __future__ import annotations

from tokenmill.engine.scheduler.fairness import Need
from tokenmill.engine.scheduler.state import SchedulerState


class Room:
    """Counts what earlier requests take, so that the next one needs a row and pages besides.

    Attributes:
        num_rows: rows of the counted requests.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._windows = state.kv.windows
        self.num_rows = self._num_pages = self._num_windows = 0

    def is_there(self, pages: int, matched: int = 0) -> bool:
        """Return True if one more can take its row and `pages` now, besides its `matched` pages of the full group."""
        state, windows = self._state, self._windows
        is_there = self.num_rows < state.rows.num_free and self._num_pages + pages <= state.num_available_pages
        return is_there and (windows is None or self._windows_with(pages + matched) <= windows.num_left)

    def need(self, pages: int, matched: int) -> Need:
        """Return the rows and pages that are missing for another request."""
        state, windows = self._state, self._windows
        missing_rows = self.num_rows + 1 - state.rows.num_free - state.num_returning_rows()
        missing_pages = self._num_pages + pages - state.num_available_pages - state.num_returning_pages()
        missing_windows = 0
        if windows is not None:
            missing_windows = self._windows_with(pages + matched) - windows.num_left - state.num_returning_windows()
        return Need(pages, missing_rows, missing_pages, missing_windows)

    def add(self, pages: int, matched: int) -> None:
        """Count another request's row and pages."""
        self.num_rows += 1
        self._num_pages += pages
        self._num_windows = self._windows_with(pages + matched)

    def _windows_with(self, num_pages: int) -> int:
        return 0 if self._windows is None else self._num_windows + self._windows.num_wanted(num_pages)
