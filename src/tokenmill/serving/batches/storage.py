"""The database and the bodies of batches together, and the one thread that uses the database."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tokenmill.serving.batches.batch import QuotaReached
from tokenmill.serving.batches.files import FileFolder
from tokenmill.serving.batches.store import BatchStore

T = TypeVar("T")


class Storage:
    """The stored files and batches of one server, which has the folder for itself."""

    def __init__(self, path: Path) -> None:
        """Open a folder, or create it; remove what a crash has left half done.

        Raises:
            InvalidConfig: the folder cannot be used, or another server uses it.
        """
        self.files = FileFolder(path)
        self.store = BatchStore(path / "batches.sqlite3")
        self.files.remove_all_but(self.store.file_ids())
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    async def ask(self, work: Callable[..., T], *arguments: object) -> T:
        """Run a function of the store in its thread, off the event loop.

        Raises:
            QuotaReached: the disk is full, or cannot be written for another reason.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)
        except sqlite3.OperationalError as error:
            raise QuotaReached(f"the database of batches cannot be used: {error}") from error

    def close(self) -> None:
        """Wait for the thread, and release the folder."""
        self._thread.shutdown()
        self.store.close()
        self.files.close()
