"""The ranks of one engine: start them, let them find each other, and end them together.

In a server the supervisor starts a process for each rank, in a folder that all know; offline, rank 0 starts the other
ranks, and on further machines an agent does. Rank 0 of each stage takes memory without a name and writes down where it
can be opened. The other ranks of the stage open it, and each notes its process, so that the system tells all of them
when one is gone. Stages find each other by `pipeline.chain`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import EngineFailed, InvalidConfig
from tokenmill.core.plan import StepOutcome, StepPlan
from tokenmill.core.whole_file import write_whole
from tokenmill.engine.parallel.context import ContextModel, SharedContext
from tokenmill.engine.parallel.layout import Layout, StepShape
from tokenmill.engine.parallel.messages import End
from tokenmill.engine.parallel.model import RankedModel
from tokenmill.engine.parallel.pipeline.chain import FirstStage, LaterStage, StageListener, connect
from tokenmill.engine.parallel.pipeline.link import Launch
from tokenmill.engine.parallel.shared_memory import Note, SharedMemory
from tokenmill.engine.runner.executor import Executor
from tokenmill.ipc.address import Address
from tokenmill.ipc.secret import Secret
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.kernels.native import MODULE
from tokenmill.model.sharding.collective import ALONE, Collective
from tokenmill.model.sharding.shard import Shard, check_context, check_size, stage_layers
from tokenmill.platform.host_arrays import SharedArrays
from tokenmill.platform.memory import map_shared
from tokenmill.platform.protocol import Platform
from tokenmill.startup.ranks.children import RankChildren
from tokenmill.startup.sizing.kv_size import KVSize, wanted_context

if TYPE_CHECKING:
    from tokenmill.engine.parallel.devices.collective import DeviceCollective
    from tokenmill.model.models.host_decoder import HostDecoder
    from tokenmill.model.models.native_decoder import NativeDecoder
    from tokenmill.platform.arrays import Array

# How many times the time of a step may pass until all ranks have read their weights: as the other parts of a server.
START_PATIENCE = 20.0
_LOOK_SECONDS = 0.005


class Place(msgspec.Struct):
    """The place of a group's memory, as rank 0 writes it down."""

    path: str
    num_bytes: int


class KVPlace(msgspec.Struct):
    """The place of one array of a rank's KV, as the rank writes it down."""

    path: str
    shape: list[int]
    dtype: str


class Group:
    """One rank's view of the ranks of an engine.

    Attributes:
        memory: shared by the ranks of a stage, on devices by all ranks; set once `connect` has returned.
        first_stage, later_stage: the connections of a stage's rank 0 to the other stages, if there are several.
        devices: the channel between ranks that have a device each; None: they share memory.
        context: the KV memory and attention that ranks of whole models share, on CPUs; None: they share the model.
        arrays: where the ranks' KV is, if rank 0 reads and fills that of all; None: each keeps its own to itself.
    """

    def __init__(self, config: EngineConfig) -> None:
        """
        Args:
            config: resolved, of this rank, with the settings that all ranks of the engine share.

        Raises:
            InvalidConfig: the means by which ranks find each other are missing.
        """
        if importlib.util.find_spec(MODULE) is None:
            raise InvalidConfig("ranks need native code, which is not built: run `make`, or leave out their flags")
        size = config.tensor_parallel_size * config.context_parallel_size
        self.shard = self._beside = Shard.from_rank(config.rank, size, config.pipeline_parallel_size)
        self.first_stage: FirstStage | None = None
        self.later_stage: LaterStage | None = None
        self.devices: DeviceCollective | None = None
        self.context: SharedContext | None = None
        self.arrays = SharedArrays() if config.has_kv_sources else None
        self._config = config
        self._timeout = config.rank_timeout
        self._patience = config.rank_timeout * START_PATIENCE
        self._memory: SharedMemory | None = None
        self._descriptors: list[int] = []  # open while it lives: the memory's, of rank 0, and the other processes'
        self._children: RankChildren | None = None
        self._rendezvous = Path(config.rendezvous)
        if not config.rendezvous:
            self._children = RankChildren(config, range(1, config.num_ranks_here))
            self._rendezvous = self._children.rendezvous

    @property
    def memory(self) -> SharedMemory:
        """The memory that the ranks share."""
        assert self._memory is not None, "connected before"
        return self._memory

    def connect(self, architecture: Architecture, model: str, platform: Platform) -> Collective:
        """Find the other ranks.

        Args:
            model: identifies the model and its formats by their content.
            platform: where this rank runs its part of it.

        Raises:
            InvalidConfig: this number of ranks cannot share this model.
            EngineFailed: a rank has not connected.
        """
        self.shard = msgspec.structs.replace(self.shard, sums=platform.is_accelerator)
        shares_context = self._config.context_parallel_size > 1
        if shares_context:
            check_context(architecture, self.shard.size, platform.is_accelerator)
        else:
            check_size(architecture, self.shard.size, self.shard.num_stages, self.shard.sums)
        if self._config.enable_expert_parallel and not _has_experts(architecture):
            raise InvalidConfig("--enable-expert-parallel: this model has no experts")
        beside = self._beside = Shard(self._config.rank, self._config.num_ranks) if self.shard.sums else self.shard
        step = _step_shape(self._config, architecture)
        layout = Layout(architecture, step, beside.size, beside.num_stages)
        self._descriptors.append(self._create(layout) if beside.rank == 0 else self._open(layout))
        memory = SharedMemory(self._descriptors[0], layout, beside)
        memory.write_note(Note(pid=os.getpid()))
        others = [rank for rank in range(beside.size) if rank != beside.rank]
        self._wait(lambda: all(memory.read_note(rank).pid for rank in others), "has not come")
        peers = [_process(memory.read_note(rank).pid) for rank in others]
        self._descriptors += [peer for peer in peers if peer is not None]
        memory.join(self._descriptors[1:], self._timeout, _has_cores(config_of_rank(self._config)))
        self._memory = memory
        if beside.rank == 0 and beside.num_stages > 1:
            self._find_stages(f"{model} {step}")
        self.memory.meet(self._patience)
        if platform.is_accelerator:
            from tokenmill.startup.ranks.devices import connect_devices

            self.devices = connect_devices(self._config, self.shard, platform, self._rendezvous, self._patience)
        elif shares_context:
            self.context = SharedContext(memory, step.tokens, self._patience)
        return ALONE if shares_context else self.devices or memory

    def _find_stages(self, model: str) -> None:
        config, shard, timeout = self._config, self.shard, self._timeout
        secret = Secret.read(config.master_secret) if config.nnodes > 1 else None
        meeting = Address(f"unix:{self._rendezvous}.stages")
        if config.nnodes > 1:
            meeting = Address(config.master_addr, config.master_port)
        if shard.is_first_stage:
            launch = Launch(config.model, timeout)
            self.first_stage = FirstStage(
                StageListener(meeting, secret, timeout), shard.num_stages, config.nnodes, launch
            )
            self.first_stage.gather(model, self._patience)
            return
        first = connect(meeting, secret, "stage 0", timeout, self._patience)
        own = Address(f"unix:{self._rendezvous}.stage-{shard.stage}")
        if config.nnodes > 1:
            own = Address(first.own_host)
        listener = StageListener(own, secret, timeout) if shard.stage > 1 else None
        self.later_stage = LaterStage(shard, first, listener, secret, timeout)
        self.later_stage.join(model, self._patience)

    def wait_for_all(self) -> None:
        """Wait until all ranks have loaded: free memory must not be measured while one of them still loads."""
        self._least(0)
        if self._children is not None and self.arrays is None:  # else they show their KV there
            self._children.forget_folder()

    def show_kv(self, pieces: Sequence[Array]) -> None:
        """Another rank than the first: write down where its KV is, if rank 0 moves the pages of all."""
        if self.arrays is None:
            return
        pid, told = os.getpid(), []
        for descriptor, piece in zip(self.arrays.descriptors, pieces, strict=True):
            told.append(KVPlace(f"/proc/{pid}/fd/{descriptor}", list(piece.shape), str(piece.dtype)))
        write_whole(self._kv_place(self._config.rank), msgspec.json.encode(told))

    def kv_of_others(self) -> list[Array]:
        """Rank 0: return the KV of all other ranks, in their order, mapped.

        Raises:
            EngineFailed: a rank is gone, or has not shown its KV in time.
        """
        found: list[Array] = []
        for rank in range(1, self._config.num_ranks):
            place = self._kv_place(rank)
            self._wait(place.exists, "has not shown its KV")
            for one in msgspec.json.decode(place.read_bytes(), type=list[KVPlace]):
                try:
                    descriptor = os.open(one.path, os.O_RDWR | os.O_CLOEXEC)
                except OSError as error:
                    raise EngineFailed(f"rank {rank} is gone: {error}") from error
                memory = map_shared(descriptor, os.fstat(descriptor).st_size, is_writable=True)
                os.close(descriptor)
                found.append(memory.view(one.dtype).reshape(one.shape))
        return found

    def _kv_place(self, rank: int) -> Path:
        return Path(f"{self._rendezvous}.kv-{rank}")

    def agree(
        self, config: EngineConfig, architecture: Architecture, decide: Callable[[EngineConfig], KVSize]
    ) -> KVSize:
        """Agree on the size of the KV cache, the same for all ranks: the rank with the least room decides.

        The memory asked for is per device; on CPUs it is divided among the ranks of this machine, by how many
        layers each has.
        """
        own = config
        if config.kv_cache_memory_bytes is not None and self.devices is None:
            of_stage = stage_layers(architecture, self.shard.num_stages)
            here = of_stage[stages_here(config)]
            share = len(of_stage[self.shard.stage]) / sum(map(len, here)) / self.shard.size
            own = dataclasses.replace(config, kv_cache_memory_bytes=max(1, int(config.kv_cache_memory_bytes * share)))
        return decide(dataclasses.replace(own, num_pages=self._least(decide(own).num_pages)))

    def _least(self, count: int) -> int:
        """Return the minimum of `count` over all ranks; they wait for each other here."""
        memory = self.memory
        memory.write_note(Note(os.getpid(), count))
        memory.meet(self._patience)
        least = min(memory.read_note(rank).num_pages for rank in range(self._beside.size))
        memory.meet()  # before anybody writes another note
        stage = self.first_stage or self.later_stage
        if self._beside.num_stages == 1:
            return least
        if stage is not None:
            memory.write_note(Note(os.getpid(), stage.agree(least, self._patience)))
        memory.meet(self._patience)
        least = memory.read_note(0).num_pages
        memory.meet()
        return least

    def model(self, own: NativeDecoder | HostDecoder) -> RankedModel | ContextModel:
        """Return the model that rank 0's runner runs: its own part together with those of the other ranks."""
        if self.context is not None:
            return ContextModel(own, self.memory)
        return RankedModel(own, self.memory, self.first_stage, self.arrays is not None)

    def executor(self, executor: Executor) -> GroupExecutor:
        """Return the executor of rank 0's steps."""
        return GroupExecutor(executor, self)

    def close(self) -> None:
        """End the other ranks."""
        if self._memory is not None and not self._memory.is_broken:
            with contextlib.suppress(EngineFailed):
                self._memory.post(End())
            if self.first_stage is not None:
                self.first_stage.send_end()
        self._let_go()

    def abandon(self, error: BaseException) -> None:
        """Give up this rank, which cannot start or go on, so that the other ranks do not wait for it."""
        if self._memory is not None:
            self._memory.give_up(str(error))
        self._let_go(str(error))

    def _let_go(self, trouble: str = "") -> None:
        for stage in (self.first_stage, self.later_stage):
            if stage is not None:
                stage.close(trouble)
        if self._children is not None:
            self._children.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _create(self, layout: Layout) -> int:
        descriptor = os.memfd_create("tokenmill-ranks")
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, layout.num_bytes)
        place = Place(f"/proc/{os.getpid()}/fd/{descriptor}", layout.num_bytes)
        write_whole(self._place, msgspec.json.encode(place))
        return descriptor

    @property
    def _place(self) -> Path:
        """The file in which the ranks of this stage find their memory."""
        return Path(f"{self._rendezvous}.{self._beside.stage}")

    def _open(self, layout: Layout) -> int:
        self._wait(self._place.exists, "has not begun")
        place = msgspec.json.decode(self._place.read_bytes(), type=Place)
        if place.num_bytes != layout.num_bytes:
            raise EngineFailed("the ranks of this engine were started with different configs")
        try:
            return os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise EngineFailed(f"rank 0 is gone: {error}") from error

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._patience
        while not is_there():
            if self._children is not None:
                self._children.check()
            if time.monotonic() > deadline:
                raise EngineFailed(f"rank {self._beside.rank} cannot start: another rank {what}")
            time.sleep(_LOOK_SECONDS)


class GroupExecutor:
    """Runs steps as another executor does; ends the group with the engine, and the engine when the group is broken."""

    def __init__(self, executor: Executor, group: Group) -> None:
        self._executor = executor
        self._group = group

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Launch a step on the wrapped executor."""
        return self._executor.launch(plan)

    def recover(self) -> None:
        """Recover after a failed step; raise if the group is broken: ranks that missed one meeting never meet again."""
        if not self._group.memory.is_broken:  # else what is launched may never end
            self._executor.recover()
        if self._group.memory.is_broken:
            raise self._group.memory.failure()

    def close(self) -> None:
        """Close the executor, then end the other ranks."""
        self._executor.close()
        self._group.close()


def start_group(config: EngineConfig) -> Group | None:
    """Start the ranks of an engine; see `Group`. None: there is only one rank."""
    return None if config.num_ranks == 1 else Group(config)


def stages_here(config: EngineConfig) -> slice:
    """Return the stages that run on this machine."""
    count = config.pipeline_parallel_size // config.nnodes
    return slice(config.node_rank * count, (config.node_rank + 1) * count)


def config_of_rank(config: EngineConfig) -> EngineConfig:
    """Return the config of one rank: its share of the machine, without the settings that only rank 0 uses.

    All ranks of all engines share a machine's cores, nodes and memory evenly.
    """
    size, rank, (engine, num_engines) = config.num_ranks_here, config.rank, config.replica
    if config.num_ranks == 1:
        return config
    config = dataclasses.replace(config, replica=(engine * size + rank % size, num_engines * size))
    return config if rank == 0 else dataclasses.replace(config, step_log=None, kv_events_config=None)


def _step_shape(config: EngineConfig, architecture: Architecture) -> StepShape:
    pages = -(-wanted_context(config, architecture.max_position) // config.page_size)
    return StepShape(config.step_budget, config.max_num_seqs, pages)


def _process(pid: int) -> int | None:
    """Open a descriptor that tells when a process is gone; None: the system has none, and only the deadline tells.

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
    """Return True if every rank of every engine has a core of its own."""
    return len(os.sched_getaffinity(0)) >= config.replica[1] * (config.num_threads or 1)
