"""The ranks of one engine: who starts them, how they find each other, how they end.

In a server the supervisor starts a process for each rank, in a folder that all know; offline, rank 0 starts the others.
Rank 0 takes memory without a name and writes down where it can be opened. The others open it, and each notes its
process, so that all are told by the system when one of them is gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tokenmill.config import EngineConfig
from tokenmill.core.errors import EngineFailed, InvalidConfig
from tokenmill.core.plan import StepOutcome, StepPlan
from tokenmill.machine.kv_size import KVSize, wanted_context
from tokenmill.models.architecture import Architecture, MoeSpec
from tokenmill.parallel.children import RankChildren
from tokenmill.parallel.layout import Layout, StepShape
from tokenmill.parallel.messages import End
from tokenmill.parallel.model import PartialModel, RankedModel
from tokenmill.parallel.shard import Shard, check_size
from tokenmill.parallel.shared_memory import Note, SharedMemory
from tokenmill.runner.executor import Executor

# How many times the time of a step may pass until all ranks have read their weights: as the other parts of a server.
START_PATIENCE = 20.0
_LOOK_SECONDS = 0.005


class Place(msgspec.Struct):
    """Where the memory of a group is, as rank 0 writes it down."""

    path: str
    num_bytes: int


class Group:
    """One rank's view of the ranks of an engine.

    Attributes:
        memory: what they share; there once `connect` has returned.
    """

    def __init__(self, config: EngineConfig) -> None:
        """`config`: resolved, of this rank."""
        self.shard = Shard(config.rank, config.tensor_parallel_size)
        self._config = config
        self._timeout = config.rank_timeout
        self._memory: SharedMemory | None = None
        self._descriptors: list[int] = []  # open while it lives: the memory's, of rank 0, and the other processes'
        self._children: RankChildren | None = None
        self._rendezvous = Path(config.rendezvous)
        if not config.rendezvous:
            self._children = RankChildren(config)
            self._rendezvous = self._children.rendezvous

    @property
    def memory(self) -> SharedMemory:
        """What the ranks share."""
        assert self._memory is not None, "connected before"
        return self._memory

    def connect(self, architecture: Architecture) -> SharedMemory:
        """Find the other ranks.

        Raises:
            InvalidConfig: so many ranks cannot share this model.
            EngineFailed: one of them has not come.
        """
        check_size(architecture, self.shard.size)
        if self._config.enable_expert_parallel and not _has_experts(architecture):
            raise InvalidConfig("--enable-expert-parallel: this model has no experts")
        layout = Layout(architecture, _step_shape(self._config, architecture), self.shard.size)
        self._descriptors.append(self._create(layout) if self.shard.rank == 0 else self._open(layout))
        memory = SharedMemory(self._descriptors[0], layout, self.shard)
        memory.write_note(Note(pid=os.getpid()))
        others = [rank for rank in range(self.shard.size) if rank != self.shard.rank]
        self._wait(lambda: all(memory.read_note(rank).pid for rank in others), "has not come")
        peers = [_process(memory.read_note(rank).pid) for rank in others]
        self._descriptors += [peer for peer in peers if peer is not None]
        memory.join(self._descriptors[1:], self._timeout, _has_cores(self._config))
        self._memory = memory
        if self._children is not None:
            self._children.forget_folder()
        return memory

    def wait_for_all(self) -> None:
        """Wait until all ranks have come so far in their start: what is free must not be looked at while one loads."""
        self.memory.meet(self._timeout * START_PATIENCE)

    def agree(self, config: EngineConfig, decide: Callable[[EngineConfig], KVSize]) -> KVSize:
        """The size of the KV cache, the same for all ranks: what the one with the least room decides."""
        size = decide(config)
        self.memory.write_note(Note(os.getpid(), size.num_pages))
        self.memory.meet(self._timeout * START_PATIENCE)
        least = min(self.memory.read_note(rank).num_pages for rank in range(self.shard.size))
        self.memory.meet()  # before anybody writes another note
        return decide(dataclasses.replace(config, num_pages=least))

    def model(self, own: PartialModel) -> RankedModel:
        """What rank 0's runner takes for the model."""
        return RankedModel(own, self.memory)

    def executor(self, executor: Executor) -> GroupExecutor:
        """What runs rank 0's steps."""
        return GroupExecutor(executor, self)

    def close(self) -> None:
        """End the other ranks."""
        if self._memory is not None and not self._memory.is_broken:
            with contextlib.suppress(EngineFailed):
                self._memory.post(End())
        self._let_go()

    def abandon(self, error: BaseException) -> None:
        """This rank cannot start, or cannot go on: neither shall the others wait for it."""
        if self._memory is not None:
            self._memory.give_up(str(error))
        self._let_go()

    def _let_go(self) -> None:
        if self._children is not None:
            self._children.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _create(self, layout: Layout) -> int:
        descriptor = os.memfd_create("tokenmill-ranks")
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, layout.num_bytes)
        place = Place(f"/proc/{os.getpid()}/fd/{descriptor}", layout.num_bytes)
        partial = self._rendezvous.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(place))
        partial.rename(self._rendezvous)
        return descriptor

    def _open(self, layout: Layout) -> int:
        self._wait(self._rendezvous.exists, "has not begun")
        place = msgspec.json.decode(self._rendezvous.read_bytes(), type=Place)
        if place.num_bytes != layout.num_bytes:
            raise EngineFailed("the ranks of this engine were started with different configs")
        try:
            return os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise EngineFailed(f"rank 0 is gone: {error}") from error

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._timeout * START_PATIENCE
        while not is_there():
            if self._children is not None:
                self._children.check()
            if time.monotonic() > deadline:
                raise EngineFailed(f"rank {self.shard.rank} cannot start: another rank {what}")
            time.sleep(_LOOK_SECONDS)


class GroupExecutor:
    """Runs steps as another executor does; ends the group with the engine, and the engine when the group is broken."""

    def __init__(self, executor: Executor, group: Group) -> None:
        self._executor = executor
        self._group = group

    def launch(self, plan: StepPlan) -> StepOutcome:
        """See `Executor`."""
        return self._executor.launch(plan)

    def recover(self) -> None:
        """See `Executor`. Ranks that have not met once are at different places of a pass, and never meet again."""
        self._executor.recover()
        if self._group.memory.is_broken:
            raise self._group.memory.failure()

    def close(self) -> None:
        """See `Executor`."""
        self._executor.close()
        self._group.close()


def start_group(config: EngineConfig) -> Group | None:
    """The ranks of an engine, if there is more than one; see `Group`."""
    return None if config.tensor_parallel_size == 1 else Group(config)


def config_of_rank(config: EngineConfig) -> EngineConfig:
    """What a rank is started with: its share of the machine; and nothing of what only rank 0 does.

    All ranks of all engines share the machine's cores, nodes and memory evenly.
    """
    size, rank, (engine, num_engines) = config.tensor_parallel_size, config.rank, config.replica
    if size == 1:
        return config
    kv_bytes = config.kv_cache_memory_bytes
    config = dataclasses.replace(
        config,
        replica=(engine * size + rank, num_engines * size),
        kv_cache_memory_bytes=None if kv_bytes is None else max(1, kv_bytes // size),
    )
    if rank == 0:
        return config
    return dataclasses.replace(config, step_log=None, kv_events_config=None, speculative_config=None)


def _step_shape(config: EngineConfig, architecture: Architecture) -> StepShape:
    pages = -(-wanted_context(config, architecture.max_position) // config.page_size)
    return StepShape(config.step_budget, config.max_num_seqs, pages)


def _process(pid: int) -> int | None:
    """A descriptor that tells when a process is gone; None: the system has none, and only the deadline tells.

    Raises:
        EngineFailed: it is gone.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise EngineFailed(f"another rank, process {pid}, is gone") from error
    except OSError:
        return None


def _has_experts(architecture: Architecture) -> bool:
    return any(isinstance(layer.mlp, MoeSpec) for layer in architecture.layers)


def _has_cores(config: EngineConfig) -> bool:
    """Whether every rank of every engine has a core of its own."""
    return len(os.sched_getaffinity(0)) >= config.replica[1] * (config.num_threads or 1)
