"""Clients' operations on files and batches, each on its own only. Asynchronous; other threads do the disk's work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tokenmill.core.errors import Conflict, TooLarge
from tokenmill.serving.batches.batch import (
    FILE_SECONDS,
    INPUT,
    WINDOW_SECONDS,
    Batch,
    BatchStatus,
    File,
    QuotaReached,
    TooManyObjects,
    new_id,
)
from tokenmill.serving.batches.files import IncomingFile
from tokenmill.serving.batches.runner import BatchRunner
from tokenmill.serving.batches.storage import Storage
from tokenmill.serving.batches.store import Page

MAX_FILE_BYTES = 200 << 20
MAX_OPEN_BATCHES = 100


class BatchLimits(msgspec.Struct, frozen=True):
    """The most bytes of all files together, and the most files."""

    max_bytes: int
    max_files: int


class BatchService:
    """The batch service of a server. `owner` selects a client's files and batches; those of others are not found."""

    def __init__(
        self, storage: Storage, limits: BatchLimits, runner: BatchRunner, clock: Callable[[], float] = time.time
    ) -> None:
        self._storage, self._store = storage, storage.store
        self._limits = limits
        self._runner = runner
        self._clock = clock
        self._incoming: set[IncomingFile] = set()
        self._num_bytes = 0

    # --- files ------------------------------------------------------------------------------------------------------

    async def begin_file(self) -> IncomingFile:
        """Begin a file, which must then be given to `keep_file` or `drop_file`.

        Raises:
            TooManyObjects: there are as many files as allowed.
            QuotaReached: there is no room for more bytes.
        """
        await self._runner.sweep()
        count, self._num_bytes = await self._storage.ask(self._store.room_taken)
        if count + len(self._incoming) >= self._limits.max_files:
            raise TooManyObjects(f"there are {count} files already; delete some, or raise --batch-max-files")
        self._check_room(0)
        with _full_disk():
            incoming = await asyncio.to_thread(self._storage.files.new, new_id("file-"))
        self._incoming.add(incoming)
        return incoming

    def write_file(self, incoming: IncomingFile, data: bytes) -> None:
        """Write a part of a file. Call it in a thread: it blocks on the disk.

        Raises:
            TooLarge, QuotaReached: the file or all files together would be too large, or the disk is full.
        """
        if incoming.num_bytes + len(data) > MAX_FILE_BYTES:
            raise TooLarge(f"a file has at most {MAX_FILE_BYTES} bytes", "file")
        self._check_room(len(data))
        with _full_disk():
            incoming.write(data)

    async def keep_file(self, owner: str, incoming: IncomingFile, filename: str, seconds: int | None) -> File:
        """Keep a complete file for `seconds`; None: the default time.

        Raises:
            QuotaReached: the disk is full.
        """
        with _full_disk():
            file = await asyncio.to_thread(incoming.keep, filename, INPUT, self._clock())
        file.expires_at = file.created_at + (FILE_SECONDS if seconds is None else seconds)
        try:
            await self._storage.ask(self._store.add_file, owner, file)
        except Exception:
            # Not where this is cancelled: the store's thread may still take it in.
            await asyncio.to_thread(self._storage.files.remove, [file.id])
            raise
        self._incoming.discard(incoming)
        self._num_bytes += file.bytes
        return file

    async def drop_file(self, incoming: IncomingFile) -> None:
        """Drop an incomplete file; do nothing if it has been kept."""
        self._incoming.discard(incoming)
        await asyncio.to_thread(incoming.drop)

    async def file(self, owner: str, file_id: str) -> File:
        """Return a file.

        Raises:
            NotFound: this owner has no such file.
        """
        await self._runner.sweep()
        return await self._storage.ask(self._store.file, owner, file_id)

    def body(self, file: File) -> Path:
        """Return the path of a file's body."""
        return self._storage.files.body(file.id)

    async def files(self, owner: str, page: Page, purpose: str | None) -> tuple[list[File], bool]:
        """Return a page of files, and whether more follow."""
        await self._runner.sweep()
        return await self._storage.ask(self._store.files, owner, page, purpose)

    async def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file and its body.

        Raises:
            NotFound, Conflict: there is no such file, or an open batch needs it.
        """
        await self._storage.ask(self._store.remove_file, owner, file_id)
        await asyncio.to_thread(self._storage.files.remove, [file_id])

    # --- batches ----------------------------------------------------------------------------------------------------

    async def create(
        self, owner: str, endpoint: str, input_file_id: str, metadata: dict[str, str] | None, seconds: int | None
    ) -> Batch:
        """Accept a batch, whose lines are checked later and whose output files are kept for `seconds`.

        Raises:
            NotFound, InvalidRequest: its input file does not exist, or is not an input.
            TooManyObjects: too many batches have not ended.
        """
        await self._runner.sweep()
        if len(await self._storage.ask(self._store.open_batches)) >= MAX_OPEN_BATCHES:
            raise TooManyObjects(f"{MAX_OPEN_BATCHES} batches have not ended; try again when one has", 60)
        now = int(self._clock())
        batch = Batch(
            id=new_id("batch_"),
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=now,
            expires_at=now + WINDOW_SECONDS,
            metadata=metadata,
        )
        kept = FILE_SECONDS if seconds is None else seconds
        await self._storage.ask(self._store.add_batch, owner, batch, kept)
        self._runner.take_up(batch.id)
        return batch

    async def batch(self, owner: str, batch_id: str) -> Batch:
        """Return a batch.

        Raises:
            NotFound: this owner has no such batch.
        """
        return await self._storage.ask(self._store.batch, owner, batch_id)

    async def owner(self, batch_id: str) -> str:
        """Return the owner of a batch."""
        return await self._storage.ask(self._store.owner, batch_id)

    async def batches(self, owner: str, page: Page) -> tuple[list[Batch], bool]:
        """Return a page of batches, and whether more follow."""
        return await self._storage.ask(self._store.batches, owner, page)

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Cancel a batch: run no more of its lines.

        Raises:
            NotFound: this owner has no such batch.
            Conflict: it has ended, or is about to.
        """
        await self.batch(owner, batch_id)
        batch = await self._storage.ask(self._store.move, batch_id, BatchStatus.CANCELLING, self._clock())
        if batch.status not in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
            raise Conflict(f"a batch that is {batch.status.value} cannot be cancelled", "batch_id")
        self._runner.stop(batch_id)
        return batch

    # --- inside -----------------------------------------------------------------------------------------------------

    def _check_room(self, num_bytes: int) -> None:
        taken = self._num_bytes + sum(incoming.num_bytes for incoming in self._incoming)
        if taken + num_bytes >= self._limits.max_bytes:
            raise QuotaReached(
                f"files take {taken} of the {self._limits.max_bytes} bytes that they may take; delete some, or raise "
                "--batch-max-bytes"
            )


@contextmanager
def _full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise QuotaReached(f"the server cannot write the file: {error.strerror}") from error
