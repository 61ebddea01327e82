"""The step log: what came, what was decided and what it brought, one record per step.

The last thousand records stay in memory for whoever has to explain a hang; `--step-log FILE` appends all of them to a
file, from which `tokenmill replay` drives the real scheduler again. In the file each record is msgpack with its length
before it (4 bytes, big-endian); the first is the header.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from tokenmill.engine.events import AnyEvent
from tokenmill.errors import TokenMillError
from tokenmill.scheduler.config import SchedulerConfig
from tokenmill.scheduler.plan import StepPlan, StepResult

logger = logging.getLogger(__name__)

RECORDS_KEPT = 1000
VERSION = 1
_LENGTH = struct.Struct(">I")


class LogHeader(msgspec.Struct, kw_only=True):
    """All that a scheduler needs to start as the recorded one did."""

    version: int = VERSION
    scheduler: SchedulerConfig
    num_pages: int
    page_size: int
    enable_prefix_caching: bool
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    depth: int


class StepRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One turn of the engine's loop.

    Attributes:
        events: what arrived before it, in order.
        plan: the plan it launched, as plain data; None: nothing could be launched.
        committed: the step it took in; None: none was due. With overlap it is an older one than `plan`.
        token_ids: what that step sampled, -1 where it did not.
        failures: why requests of that step could not go on, by their place in it.
        error: why the step failed.
        waiting: why the first of the waiting requests waits.
        seconds: of scheduling, of waiting for the step, of committing.
    """

    events: list[AnyEvent] = []
    plan: dict[str, Any] | None = None
    committed: int | None = None
    token_ids: list[int] = []
    failures: dict[int, str] = {}
    error: str | None = None
    waiting: str = ""
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)


class StepLog:
    """Collects records. Without a file nothing is converted: a record in memory costs next to nothing."""

    def __init__(self, path: Path | None = None, header: LogHeader | None = None) -> None:
        """Open `path` for appending, if there is one; its header is written at once."""
        self._events: list[AnyEvent] = []
        self._recent: deque[tuple[StepPlan | None, StepRecord]] = deque(maxlen=RECORDS_KEPT)
        self._file: RawIOBase | None = None
        if path is not None:
            assert header is not None, "a log file begins with its header"
            try:
                self._file = path.open("wb", buffering=0)  # a killed engine leaves whole records behind
            except OSError as error:
                raise TokenMillError(f"--step-log {path}: {error.strerror}") from error
            self._write(header)

    def note(self, event: AnyEvent) -> None:
        """Something arrived; it belongs to the next record of the file. Memory does not keep it: prompts are long."""
        if self._file is not None:
            self._events.append(event)

    def add(self, plan: StepPlan | None, result: StepResult | None, record: StepRecord) -> None:
        """A turn of the loop is over; `record` holds what is not in its plan and its result."""
        events, self._events = self._events, []
        if plan is None and result is None and not events and record.error is None:
            return  # an idle turn
        if result is not None:
            record = msgspec.structs.replace(
                record, committed=result.step, token_ids=result.token_ids.tolist(), failures=result.failures
            )
        self._recent.append((plan, record))
        if self._file is not None:
            self._write(_with_plan(plan, msgspec.structs.replace(record, events=events)))

    def recent(self) -> Iterator[StepRecord]:
        """The last thousand records, oldest first."""
        return (_with_plan(plan, record) for plan, record in self._recent)

    def close(self) -> None:
        """Finish the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: LogHeader | StepRecord) -> None:
        """A full disk ends the log, never the engine."""
        assert self._file is not None, "the log is closed"
        payload = msgspec.msgpack.encode(record)
        try:
            self._file.write(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            logger.error("the step log ends here: %s", error.strerror)
            self.close()


def plain_plan(plan: StepPlan) -> dict[str, Any]:
    """A plan as msgpack would bring it back: dicts, lists, numbers, strings."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plan, enc_hook=_array_to_list), type=dict[str, Any])


def read_log(path: Path) -> tuple[LogHeader, Iterator[StepRecord]]:
    """Open a log. A record that was cut off at the end (the engine was killed) is left out.

    Raises:
        TokenMillError: it cannot be read, or it is no step log of this version.
    """
    try:
        payloads = _payloads(path.read_bytes())
        header = msgspec.msgpack.decode(next(payloads), type=LogHeader)
    except OSError as error:
        raise TokenMillError(f"cannot read {path}: {error.strerror}") from error
    except (StopIteration, msgspec.DecodeError) as error:
        raise TokenMillError(f"{path} is not a step log") from error
    if header.version != VERSION:
        raise TokenMillError(f"{path} is a step log of version {header.version}; this is version {VERSION}")
    return header, (msgspec.msgpack.decode(payload, type=StepRecord) for payload in payloads)


def _payloads(data: bytes) -> Iterator[bytes]:
    position = 0
    while position + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        if position + length > len(data):
            return
        yield data[position : position + length]
        position += length


def _with_plan(plan: StepPlan | None, record: StepRecord) -> StepRecord:
    return record if plan is None else msgspec.structs.replace(record, plan=plain_plan(plan))


def _array_to_list(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"a plan holds a {type(value).__name__}")
