"""Answer the lines of open batches, and end each batch once.

    validating: check the input -> in_progress: feed lines, in turns with other batches -> write the files -> end

Lines are fed while no interactive request waits, up to a number at a time. Outcomes are recorded in groups. After any
end of the process, the next one goes on from the records: lines without an outcome run again, with the same seed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec

from tokenmill.serving.batches.batch import OUTPUT, Batch, BatchStatus, LineFault, new_id
from tokenmill.serving.batches.files import IncomingFile
from tokenmill.serving.batches.lines import (
    InputLines,
    LineEnd,
    LinePlace,
    Outcome,
    answered_line,
    read_lines,
    unanswered_line,
)
from tokenmill.serving.batches.storage import Storage

_logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.1
GATE_SECONDS = 0.05
EXPIRY_SECONDS = 1.0
SWEEP_SECONDS = 60.0
RETRY_SECONDS = 2.0
# Lines that are taken out of the database at a time.
CHUNK = 64
# What says nothing about the line itself: too much waits, or something is being started again.
_LATER = frozenset({429, 503})


class Reply(NamedTuple):
    """A route's reply to the request of a line."""

    status: int
    body: bytes


class _Body(msgspec.Struct):
    usage: dict[str, Any] | None = None


# (endpoint, id of the batch, id of the request, the line) -> its reply; the line's own faults are replies too.
Answer = Callable[[str, str, str, bytes], Awaitable[Reply]]


class BatchRunner:
    """Runs all batches of one server.

    Attributes:
        ended: number of lines by their outcome, since the start.
    """

    def __init__(
        self,
        storage: Storage,
        is_busy: Callable[[], bool],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            is_busy: returns True while an interactive request waits: no line is fed then.
        """
        self.ended = Counter({outcome.value: 0 for outcome in Outcome})
        self._num_unanswered = 0
        self._num_running = 0
        self._storage, self._store = storage, storage.store
        self._is_busy = is_busy
        self._clock = clock
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._feeding: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, list[LineEnd]] = {}  # by batch; what is not yet recorded
        self._answered = asyncio.Event()
        self._flushing = asyncio.Lock()
        self._cannot_write = False

    @property
    def lines(self) -> dict[str, int]:
        """Number of lines of open batches, by their state."""
        queued = max(0, self._num_unanswered - self._num_running)
        return {"queued": queued, "running": self._num_running}

    async def run(self, answer: Answer, num_slots: int) -> None:
        """Run all open and new batches until cancelled; answers that have come by then are kept.

        Args:
            num_slots: most lines that run at the same time.
        """
        self._answer = answer
        self._slots = asyncio.Semaphore(num_slots)  # first come, first served: batches take turns
        tasks = [
            asyncio.ensure_future(self._resume()),
            asyncio.ensure_future(self._flush_often()),
            asyncio.ensure_future(self._sweep_often()),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            tasks += self._jobs.values()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._flush()

    async def _resume(self) -> None:
        for batch in await self._storage.ask(self._store.open_batches):
            if batch.id not in self._jobs:
                self.take_up(batch.id)

    def take_up(self, batch_id: str) -> None:
        """Work on a batch until it has ended."""
        job = self._jobs[batch_id] = asyncio.ensure_future(self._work_on(batch_id))
        job.add_done_callback(lambda _: self._jobs.pop(batch_id, None))

    def stop(self, batch_id: str) -> None:
        """Run no more lines of a batch and cancel the running ones; the batch's status decides what follows."""
        if batch_id in self._feeding:
            self._feeding[batch_id].cancel()

    # --- one batch --------------------------------------------------------------------------------------------------

    async def _work_on(self, batch_id: str) -> None:
        while True:
            try:
                return await self._work(batch_id)
            except Exception:
                # All that matters is in the database: to begin again is what a restart does.
                _logger.exception("a batch failed and is tried again")
                await asyncio.sleep(RETRY_SECONDS)

    async def _work(self, batch_id: str) -> None:
        ask, store = self._storage.ask, self._store
        batch = await ask(store.batch, None, batch_id)
        if batch.status is BatchStatus.VALIDATING:
            lines = await asyncio.to_thread(self._read_lines, batch)
            batch = await ask(store.begin_batch, batch_id, lines, self._clock())
            await self._flush()
        if batch.status is BatchStatus.IN_PROGRESS:
            is_through = await self._feed_until_over(batch)
            await self._flush()
            if is_through:
                await ask(store.move, batch_id, BatchStatus.FINALIZING, self._clock())
            batch = await ask(store.batch, None, batch_id)
        if not batch.status.is_final:
            await self._end(batch)
            await self._flush()

    def _read_lines(self, batch: Batch) -> InputLines:
        try:
            return read_lines(self._storage.files.body(batch.input_file_id), batch.endpoint)
        except FileNotFoundError:
            return InputLines(faults=[LineFault("file_not_found", "the input file is gone")])

    async def _feed_until_over(self, batch: Batch) -> bool:
        """Run lines until all have an outcome (True), or the batch is stopped or expires (False)."""
        feeding = self._feeding[batch.id] = asyncio.ensure_future(self._feed(batch))
        try:
            while not feeding.done() and self._clock() < batch.expires_at:
                await asyncio.wait([feeding], timeout=EXPIRY_SECONDS)
        finally:
            del self._feeding[batch.id]
            feeding.cancel()
            await asyncio.wait([feeding])
        if feeding.cancelled():
            return False
        feeding.result()  # raises what went wrong
        return True

    async def _feed(self, batch: Batch) -> None:
        number = 0
        async with asyncio.TaskGroup() as running:
            while places := await self._storage.ask(self._store.queued, batch.id, number, CHUNK):
                for place in places:
                    await self._slots.acquire()
                    try:
                        await self._wait_for_turn()
                    except BaseException:
                        self._slots.release()
                        raise
                    self._num_running += 1
                    running.create_task(self._run_line(batch, place)).add_done_callback(self._end_line)
                number = places[-1].number

    def _end_line(self, _: asyncio.Task[None]) -> None:
        self._num_running -= 1
        self._slots.release()

    async def _wait_for_turn(self) -> None:
        while self._is_busy() or self._cannot_write:
            await asyncio.sleep(GATE_SECONDS)

    async def _run_line(self, batch: Batch, place: LinePlace) -> None:
        raw = await asyncio.to_thread(self._storage.files.read, batch.input_file_id, place.offset, place.size)
        request_id = new_id("batch_req_")
        while (reply := await self._answer(batch.endpoint, batch.id, request_id, raw)).status in _LATER:
            await asyncio.sleep(RETRY_SECONDS)
            await self._wait_for_turn()
        is_good = reply.status == 200
        usage = msgspec.json.decode(reply.body, type=_Body).usage if is_good else None
        answer = answered_line(request_id, place.custom_id, reply.status, reply.body)
        outcome = Outcome.COMPLETED if is_good else Outcome.FAILED
        end = LineEnd(place.number, place.custom_id, outcome, answer, usage)
        self._ends.setdefault(batch.id, []).append(end)
        self._answered.set()

    # --- outcomes ---------------------------------------------------------------------------------------------------

    async def _flush_often(self) -> None:
        while True:
            await self._answered.wait()
            self._answered.clear()
            await asyncio.sleep(FLUSH_SECONDS)
            try:
                await self._flush()
            except Exception as error:
                _logger.error("answers of batches cannot be written, batches are paused: %s", error)
                self._answered.set()
                await asyncio.sleep(RETRY_SECONDS)

    async def _flush(self) -> None:
        """Record the answers; return when they are on the disk."""
        async with self._flushing:
            try:
                for batch_id in list(self._ends):
                    ends = tuple(self._ends[batch_id])
                    await self._storage.ask(self._store.record, batch_id, ends)
                    del self._ends[batch_id][: len(ends)]
                    self.ended.update(end.outcome.value for end in ends if end.outcome)
                    if not self._ends[batch_id]:
                        del self._ends[batch_id]
                self._num_unanswered = await self._storage.ask(self._store.num_unanswered)
            except Exception:
                self._cannot_write = True
                raise
            self._cannot_write = False

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self.sweep()
            except Exception as error:
                _logger.error("expired files cannot be removed: %s", error)

    async def sweep(self) -> None:
        """Remove expired files."""
        expired = await self._storage.ask(self._store.remove_expired, self._clock())
        await asyncio.to_thread(self._storage.files.remove, expired)

    async def _end(self, batch: Batch) -> None:
        """Write the output file and the error file, each unless it is empty, and end the batch with them."""
        files, store = self._storage.files, self._store
        unanswered = Outcome.CANCELLED if batch.status is BatchStatus.CANCELLING else Outcome.EXPIRED
        both: list[IncomingFile] = []
        try:
            for _ in range(2):
                both.append(await asyncio.to_thread(files.new, new_id("file-")))
            number = num_unanswered = 0
            while lines := await self._storage.ask(store.ended_lines, batch.id, number, CHUNK):
                num_unanswered += await asyncio.to_thread(_write_lines, lines, unanswered, *both)
                number = lines[-1].number
            names = (f"{batch.id}_output.jsonl", f"{batch.id}_error.jsonl")
            kept = [
                await asyncio.to_thread(incoming.keep, name, OUTPUT, self._clock()) if incoming.num_bytes else None
                for incoming, name in zip(both, names, strict=True)
            ]
            await self._storage.ask(store.end_batch, batch.id, *kept, self._clock())
        except Exception:
            # Not where this is cancelled: the store's thread may still let the batch end with them.
            files.remove(incoming.id for incoming in both)
            raise
        finally:
            for incoming in both:
                incoming.drop()
        self.ended[unanswered.value] += num_unanswered


def _write_lines(lines: list[LineEnd], unanswered: Outcome, output: IncomingFile, errors: IncomingFile) -> int:
    """Write each line to the output or the errors; return how many were not run."""
    for line in lines:
        target = output if line.outcome is Outcome.COMPLETED else errors
        target.write(line.answer if line.outcome else unanswered_line(line.custom_id, unanswered))
    return sum(line.outcome is None for line in lines)
