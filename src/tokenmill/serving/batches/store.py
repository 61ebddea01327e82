"""The durable state of files, batches and lines, in one SQLite database. All calls block.

A commit is on the disk when it returns (WAL, `synchronous=FULL`). A line gets an outcome at most once, however often it
is answered; its batch counts it in the same transaction. The bodies of files are stored beside it, see `files.py`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenmill.core.errors import Conflict, InvalidConfig, InvalidRequest, NotFound
from tokenmill.serving.batches.batch import INPUT, NEXT, Batch, BatchStatus, File, LineFaults
from tokenmill.serving.batches.lines import InputLines, LineEnd, LinePlace, Outcome

VERSION = 1
_SCHEMA = """
create table files (
    number integer primary key autoincrement, id text not null unique, owner text not null, purpose text not null,
    bytes integer not null, expires_at integer, object blob not null);
create table batches (
    number integer primary key autoincrement, id text not null unique, owner text not null, input text not null,
    is_open integer not null, output_seconds integer not null, object blob not null);
create table lines (
    batch text not null, line integer not null, custom_id text not null, offset integer not null,
    size integer not null, outcome text, answer blob, primary key (batch, line), unique (batch, custom_id));
create index open_batches on batches (input) where is_open;
"""


_ENDS = {
    BatchStatus.IN_PROGRESS: BatchStatus.EXPIRED,
    BatchStatus.FINALIZING: BatchStatus.COMPLETED,
    BatchStatus.CANCELLING: BatchStatus.CANCELLED,
}


class Page(NamedTuple):
    """A page of a list: up to `limit` objects after `after`, newest first, or oldest first if `is_rising`."""

    after: str | None = None
    limit: int = 20
    is_rising: bool = False


class BatchStore:
    """The database of files, batches and lines. Only one thread may use it at a time."""

    def __init__(self, path: Path) -> None:
        """Open a database, or create it.

        Raises:
            InvalidConfig: the database cannot be used.
        """
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # answers are private
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=full")
            (version,) = self._db.execute("pragma user_version").fetchone()
            if version == 0:
                with self._transaction():
                    for statement in _SCHEMA.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"pragma user_version={VERSION}")
            elif version != VERSION:
                raise InvalidConfig(f"--batch-dir: {path} is of another version of TokenMill ({version})")
        except (OSError, sqlite3.Error) as error:
            raise InvalidConfig(f"--batch-dir: {path} cannot be used: {error}") from error

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    # --- files ------------------------------------------------------------------------------------------------------

    def add_file(self, owner: str, file: File) -> None:
        """Add a file whose body is stored."""
        self._db.execute(
            "insert into files (id, owner, purpose, bytes, expires_at, object) values (?, ?, ?, ?, ?, ?)",
            (file.id, owner, file.purpose, file.bytes, file.expires_at, msgspec.json.encode(file)),
        )

    def file(self, owner: str, file_id: str) -> File:
        """Return a file.

        Raises:
            NotFound: this owner has no file of this id.
        """
        row = self._db.execute("select object from files where id=? and owner=?", (file_id, owner)).fetchone()
        if row is None:
            raise NotFound("no file has this id", "file_id")
        return msgspec.json.decode(row[0], type=File)

    def files(self, owner: str, page: Page, purpose: str | None = None) -> tuple[list[File], bool]:
        """Return a page of an owner's files, and whether more follow."""
        rows, has_more = self._page("files", owner, page, purpose)
        return [msgspec.json.decode(row, type=File) for row in rows], has_more

    def remove_file(self, owner: str, file_id: str) -> None:
        """Forget a file.

        Raises:
            NotFound: this owner has no file of this id.
            Conflict: a batch that has not ended reads it.
        """
        self.file(owner, file_id)
        if self._db.execute("select 1 from batches where is_open and input=?", (file_id,)).fetchone():
            raise Conflict("a batch that has not ended needs this file: cancel it first", "file_id")
        self._db.execute("delete from files where id=?", (file_id,))

    def remove_expired(self, now: float) -> list[str]:
        """Forget expired files that no open batch needs; return their ids."""
        unused = "expires_at <= ? and id not in (select input from batches where is_open)"
        return [row[0] for row in self._db.execute(f"delete from files where {unused} returning id", (now,)).fetchall()]

    def room_taken(self) -> tuple[int, int]:
        """Return the number of files, and their bytes."""
        count, num_bytes = self._db.execute("select count(*), coalesce(sum(bytes), 0) from files").fetchone()
        return count, num_bytes

    def file_ids(self) -> set[str]:
        """Return the ids of all owners' files."""
        return {row[0] for row in self._db.execute("select id from files")}

    # --- batches ----------------------------------------------------------------------------------------------------

    def add_batch(self, owner: str, batch: Batch, output_seconds: int) -> None:
        """Accept a batch.

        Raises:
            NotFound: the owner has no such input file.
            InvalidRequest: that file is not an input.
        """
        if self.file(owner, batch.input_file_id).purpose != INPUT:
            raise InvalidRequest(f"the file's purpose must be {INPUT}", "input_file_id")
        self._db.execute(
            "insert into batches (id, owner, input, is_open, output_seconds, object) values (?, ?, ?, 1, ?, ?)",
            (batch.id, owner, batch.input_file_id, output_seconds, msgspec.json.encode(batch)),
        )

    def owner(self, batch_id: str) -> str:
        """Return the owner of a batch; for an unknown batch, its id, which no HTTP client can have as owner."""
        row = self._db.execute("select owner from batches where id=?", (batch_id,)).fetchone()
        return batch_id if row is None else str(row[0])

    def batch(self, owner: str | None, batch_id: str) -> Batch:
        """Return a batch; owner None: of any owner.

        Raises:
            NotFound: this owner has no batch of this id.
        """
        row = self._db.execute("select owner, object from batches where id=?", (batch_id,)).fetchone()
        if row is None or owner not in (None, row[0]):
            raise NotFound("no batch has this id", "batch_id")
        return msgspec.json.decode(row[1], type=Batch)

    def batches(self, owner: str, page: Page) -> tuple[list[Batch], bool]:
        """Return a page of an owner's batches, and whether more follow."""
        rows, has_more = self._page("batches", owner, page)
        return [msgspec.json.decode(row, type=Batch) for row in rows], has_more

    def open_batches(self) -> list[Batch]:
        """Return the batches that have not ended, the oldest first."""
        rows = self._db.execute("select object from batches where is_open order by number")
        return [msgspec.json.decode(row[0], type=Batch) for row in rows]

    def num_unanswered(self) -> int:
        """Return how many lines of open batches have no outcome."""
        counts = [batch.request_counts for batch in self.open_batches()]
        return sum(count.total - count.completed - count.failed for count in counts)

    def move(self, batch_id: str, status: BatchStatus, now: float) -> Batch:
        """Change the status of a batch if that is legal; return the batch as it is then."""
        with self._transaction():
            batch = self.batch(None, batch_id)
            if status in NEXT.get(batch.status, ()):
                batch.move_to(status, now)
            return self._put(batch)

    def begin_batch(self, batch_id: str, lines: InputLines, now: float) -> Batch:
        """Begin a checked batch with its lines, or fail it for their faults; return the batch."""
        with self._transaction():
            batch = self.batch(None, batch_id)
            if batch.status is not BatchStatus.VALIDATING:
                return batch  # it has been cancelled
            batch.model = lines.model
            if lines.faults:
                batch.errors = LineFaults(lines.faults)
            else:
                rows = ((batch_id, *place) for place in lines.places)
                self._db.executemany("insert into lines values (?, ?, ?, ?, ?, null, null)", rows)
                batch.request_counts.total = len(lines.places)
            batch.move_to(BatchStatus.FAILED if lines.faults else BatchStatus.IN_PROGRESS, now)
            return self._put(batch)

    def queued(self, batch_id: str, after: int, limit: int) -> list[LinePlace]:
        """Return the next lines of a batch that have no outcome."""
        where = "batch=? and line>? and outcome is null order by line limit ?"
        what = f"line, custom_id, offset, size from lines where {where}"
        rows = self._db.execute(f"select {what}", (batch_id, after, limit))
        return [LinePlace(*row) for row in rows]

    def record(self, batch_id: str, ends: Iterable[LineEnd]) -> None:
        """Record the first outcome of each line; ignore lines that have one, or whose batch has ended."""
        with self._transaction():
            batch = self.batch(None, batch_id)
            for end in ends:
                changed = self._db.execute(
                    "update lines set outcome=?, answer=? where batch=? and line=? and outcome is null",
                    (end.outcome and end.outcome.value, end.answer, batch_id, end.number),
                )
                if changed.rowcount and end.outcome is Outcome.COMPLETED:
                    batch.request_counts.completed += 1
                    batch.usage.add(end.usage or {})
                elif changed.rowcount:
                    batch.request_counts.failed += 1
            self._put(batch)

    def ended_lines(self, batch_id: str, after: int, limit: int) -> list[LineEnd]:
        """Return the next lines of a batch with their outcomes, in order."""
        what = "line, custom_id, outcome, answer from lines where batch=? and line>? order by line limit ?"
        rows = self._db.execute(f"select {what}", (batch_id, after, limit))
        return [LineEnd(line, name, Outcome(end) if end else None, answer) for line, name, end, answer in rows]

    def end_batch(self, batch_id: str, output: File | None, errors: File | None, now: float) -> Batch:
        """End a batch with these files of answers, and forget its lines; return the batch."""
        with self._transaction():
            batch = self.batch(None, batch_id)
            batch.move_to(_ENDS[batch.status], now)
            row = self._db.execute("select owner, output_seconds from batches where id=?", (batch_id,)).fetchone()
            for name, file in (("output_file_id", output), ("error_file_id", errors)):
                if file is not None:
                    file.expires_at = file.created_at + row[1]
                    self.add_file(row[0], file)
                    setattr(batch, name, file.id)
            self._db.execute("delete from lines where batch=?", (batch_id,))
            return self._put(batch)

    # --- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("begin immediate")
        try:
            yield
            self._db.execute("commit")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("rollback")
            raise

    def _put(self, batch: Batch) -> Batch:
        values = (not batch.status.is_final, msgspec.json.encode(batch), batch.id)
        self._db.execute("update batches set is_open=?, object=? where id=?", values)
        return batch

    def _page(self, table: str, owner: str, page: Page, purpose: str | None = None) -> tuple[list[bytes], bool]:
        where, values = ["owner=?"], [owner]
        if purpose is not None:
            where.append("purpose=?")
            values.append(purpose)
        if page.after is not None:
            where.append(f"number {'>' if page.is_rising else '<'} (select number from {table} where id=? and owner=?)")
            values += [page.after, owner]
        order = f"number {'asc' if page.is_rising else 'desc'} limit {page.limit + 1}"
        rows = self._db.execute(f"select object from {table} where {' and '.join(where)} order by {order}", values)
        found = [row[0] for row in rows]
        return found[: page.limit], len(found) > page.limit
