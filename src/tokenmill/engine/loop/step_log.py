"""The step log: inputs, decisions and outcomes of the engine, one record per step.

The last thousand records stay in memory to explain a hang; `--step-log FILE` appends all of them to a
file, from which `tokenmill replay` drives the real scheduler again. In the file each record is msgpack with its length
before it (4 bytes, big-endian); the first is the header.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from tokenmill.config.configs import EngineConfig
from tokenmill.config.speculation import SpeculationSettings
from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.core.messages import AddRequest
from tokenmill.core.plan import RowFailure, StepPlan, StepResult
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.transfers import TransferEvent, TransferSettings
from tokenmill.engine.kv.kv_manager import KVManager, NoKV
from tokenmill.engine.kv.page_pool import RESERVED_PAGES, PagePool
from tokenmill.engine.kv.radix_tree import NullCache, RadixTree
from tokenmill.engine.kv.window_pages import WindowSettings
from tokenmill.engine.scheduler.config import SchedulerConfig, policies_of, scheduler_config_of
from tokenmill.engine.scheduler.drafter import Drafter
from tokenmill.engine.scheduler.resources.resource import Resource
from tokenmill.engine.scheduler.scheduler import EngineScheduler, find_scheduler
from tokenmill.engine.scheduler.standard import standard_resources
from tokenmill.engine.speculation.speculation import Speculation

logger = logging.getLogger(__name__)

RECORDS_KEPT = 1000
VERSION = 4
_LENGTH = struct.Struct(">I")


class _Input(msgspec.Struct, tag=True):
    """An input from outside that changes what the scheduler will decide; the class name is the tag."""


class Added(_Input):
    """Records `Engine.add`; `status` is the value of a `RequestStatus`."""

    message: AddRequest
    status: str


class Extended(_Input):
    """Records `Engine.extend`."""

    id: str
    token_ids: list[int]
    params: SamplingParams
    is_last: bool


class Woken(_Input):
    """Records `Engine.wake`."""

    id: str


class Aborted(_Input):
    """Records `Engine.abort`."""

    ids: list[str]


class CacheReset(_Input):
    """Records `Engine.reset_prefix_cache`."""

    preempt_running: bool


class Paused(_Input):
    """Records `Engine.set_paused`."""

    is_paused: bool


RecordedInput = Added | Extended | Woken | Aborted | CacheReset | Paused | TransferEvent


class LogHeader(msgspec.Struct, kw_only=True):
    """Everything that a scheduler needs to start as the recorded one did."""

    version: int = VERSION
    scheduler: SchedulerConfig
    num_pages: int
    page_size: int
    enable_prefix_caching: bool
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    depth: int
    speculation: SpeculationSettings | None = None
    transfers: TransferSettings | None = None
    window: WindowSettings | None = None
    keeps_kv: bool = True
    least_copied: int = 0

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        num_pages: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: list[int],
        state_slots: int = 0,
    ) -> Self:
        """Return the header for a config, given what is known of the model and its memory.

        Raises:
            InvalidConfig: see `scheduler_config_of`.
        """
        return cls(
            scheduler=scheduler_config_of(config, max_model_len, state_slots),
            num_pages=num_pages,
            page_size=config.page_size,
            enable_prefix_caching=config.enable_prefix_caching,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            depth=config.num_steps_ahead,
        )

    def make_scheduler(self, drafter: Drafter | None = None, resources: Iterable[Resource] = ()) -> EngineScheduler:
        """Make a scheduler over `num_pages` usable pages; the reserved page 0 comes on top.

        Args:
            drafter: see `Scheduler`; None: the one that `speculation` says, if it says any.
            resources: those that this header says nothing of, which replays therefore lack.

        Raises:
            InvalidConfig: see `find_scheduler`; or nothing can run with these settings.
        """
        if drafter is None and self.speculation is not None:
            drafter = Speculation(self.speculation)
        make_cache = RadixTree if self.enable_prefix_caching else NullCache
        cache = make_cache(self.page_size, policy=policies_of(self.scheduler).eviction)
        num_pages = self.num_pages + RESERVED_PAGES
        kv = KVManager(PagePool(num_pages), cache, self.page_size) if self.keeps_kv else NoKV(self.page_size)
        standard = standard_resources(self.scheduler, kv, self.window, self.depth)
        if self.least_copied:
            from tokenmill.engine.transfer.page_copies import PageCopies

            standard.append(PageCopies(kv, self.least_copied, standard))
        if self.transfers is not None:
            from tokenmill.engine.transfer.state import TransferState

            standard.append(TransferState(kv, self.transfers, standard))
        make = find_scheduler(self.scheduler.scheduler_cls)
        return make(self.scheduler, kv, (*standard, *resources), () if drafter is None else (drafter,))


class StepRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One iteration of the engine's loop.

    Attributes:
        inputs: what arrived before it, in order.
        plan: the plan it launched, as plain data; None: nothing could be launched.
        committed: the step it took in; None: none was due. With overlap it is an older one than `plan`.
        token_ids, token_starts: what that step brought; see `StepResult`.
        failures: why requests of that step could not go on, by their place in it.
        proposals: what may follow the tokens that it brought, by place too; see `Proposal`. chances: their estimates.
        error: why the step failed.
        waiting: why the first of the waiting requests waits.
        seconds: of scheduling, of waiting for the step, of committing.
        rest: seconds before it in which messages were taken and sent; 0 where there was nothing to do before.
    """

    inputs: list[RecordedInput] = msgspec.field(default_factory=list, name="events")
    plan: dict[str, Any] | None = None
    committed: int | None = None
    token_ids: list[int] = []
    token_starts: list[int] = []
    failures: dict[int, RowFailure] = {}
    proposals: dict[int, tuple[list[int], bool]] = {}
    chances: dict[int, list[float]] = {}
    error: str | None = None
    waiting: str = ""
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    rest: float = 0.0

    @property
    def all_seconds(self) -> float:
        """Seconds from the end of the iteration before, if that was busy, to the end of this one."""
        return math.fsum((self.rest, *self.seconds))


@dataclass(slots=True)
class News:
    """Events of an iteration that its plan and result do not show. Ids and small numbers only.

    Attributes:
        at: when the iteration began, in seconds of the machine's monotonic clock.
        arrived: ids, and the tokens of their prompts.
        first: ids of requests that got their first tokens.
        ended: ids, and the reasons.
    """

    at: float = 0.0
    arrived: list[tuple[str, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    ended: list[tuple[str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.arrived or self.preempted or self.first or self.ended)


class Iteration(msgspec.Struct, frozen=True):
    """An iteration as memory keeps it. `number` counts all kept iterations, from 1."""

    number: int
    plan: StepPlan | None
    record: StepRecord
    news: News


def check_writable(path: Path) -> None:
    """Check that a log can be written, without changing what is there.

    Raises:
        InvalidConfig: it cannot.
    """
    try:
        # Without waiting: a pipe without a reader is refused.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))
    except OSError as error:
        raise InvalidConfig(f"--step-log {path}: {error.strerror}") from error


class StepLog:
    """Collects records. Without a file nothing is converted, so a record in memory costs next to nothing."""

    def __init__(self, path: Path | None = None, header: LogHeader | None = None) -> None:
        """Create or overwrite `path`, if given, and write its header at once."""
        self._inputs: list[RecordedInput] = []
        self._recent: deque[Iteration] = deque(maxlen=RECORDS_KEPT)
        self.num_iterations = 0
        self._num_bytes = 0  # of whole records
        self._file: int | None = None
        if path is not None:
            assert header is not None, "a log file begins with its header"
            try:
                # Without waiting: a slow reader of a pipe must not hold up the engine.
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
                self._file = os.open(path, flags, 0o666)
            except OSError as error:
                raise InvalidConfig(f"--step-log {path}: {error.strerror}") from error
            self._write(header)

    def record(self, arrived: RecordedInput) -> None:
        """Add an input to the next record of the file. Memory does not keep it: prompts are long."""
        if self._file is not None:
            self._inputs.append(arrived)

    def add(self, plan: StepPlan | None, result: StepResult | None, record: StepRecord, news: News) -> None:
        """Add a finished iteration of the loop; `record` and `news` hold what its plan and result do not."""
        inputs, self._inputs = self._inputs, []
        if plan is None and result is None and not inputs and not news and record.error is None:
            return  # an idle iteration
        if result is not None:
            record = msgspec.structs.replace(
                record,
                committed=result.step,
                token_ids=result.token_ids.tolist(),
                token_starts=result.token_starts.tolist(),
                failures=result.failures,
                proposals={index: (one.token_ids.tolist(), one.is_forced) for index, one in result.proposals.items()},
                chances={
                    index: one.probabilities.tolist()
                    for index, one in result.proposals.items()
                    if one.probabilities is not None
                },
            )
        self._keep(plan, record, news)
        if self._file is not None:
            self._write(_with_plan(plan, msgspec.structs.replace(record, inputs=inputs)))

    def add_news(self, news: News) -> None:
        """Add news from between two iterations as an iteration in memory alone, since the file is replayed."""
        self._keep(None, StepRecord(), news)

    def _keep(self, plan: StepPlan | None, record: StepRecord, news: News) -> None:
        self.num_iterations += 1
        self._recent.append(Iteration(self.num_iterations, plan, record, news))

    def recent(self) -> Iterator[StepRecord]:
        """Return the last thousand records, oldest first."""
        return (_with_plan(iteration.plan, iteration.record) for iteration in self._recent)

    def iterations(self) -> list[Iteration]:
        """Return the last thousand iterations, oldest first."""
        return list(self._recent)

    def close(self) -> None:
        """Finish the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: LogHeader | StepRecord) -> None:
        """Write a record; a full disk ends the log, never the engine."""
        assert self._file is not None, "the log is closed"
        payload = msgspec.msgpack.encode(record)
        rest = memoryview(_LENGTH.pack(len(payload)) + payload)
        try:
            while rest:  # at once, so that a killed engine leaves whole records behind
                rest = rest[os.write(self._file, rest) :]
            self._num_bytes += _LENGTH.size + len(payload)
        except OSError as error:
            logger.error("the step log ends here: %s", error.strerror)
            with contextlib.suppress(OSError):  # a pipe
                os.ftruncate(self._file, self._num_bytes)
            self.close()


def plain_plan(plan: StepPlan) -> dict[str, Any]:
    """Convert a plan to what msgpack would bring back: dicts, lists, numbers, strings."""
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(plan, enc_hook=_array_to_list), type=dict[str, Any])
    if plan.window_pages is None:
        del plain["window_pages"]  # a log of an engine without a window group has the bytes that it always had
    return plain


def read_log(path: Path) -> tuple[LogHeader, Iterator[StepRecord]]:
    """Open a log. A last record that was cut off (the engine was killed) is left out.

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
