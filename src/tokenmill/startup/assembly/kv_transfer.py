"""KV beyond the engine: keep prefixes on disk or in the host's memory, take them from plug-ins and other engines, and
report what the cache takes in and gives up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from tokenmill.config.configs import EngineConfig
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.extension import EngineExtension
from tokenmill.engine.kv.events import KVEventLog
from tokenmill.engine.loop.step_log import LogHeader
from tokenmill.engine.runner.executor import Executor
from tokenmill.engine.scheduler.scheduler import EngineScheduler
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.models.native_decoder import native_pass_obstacle
from tokenmill.model.weights.fingerprint import fingerprint
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.memory import StepMemory
from tokenmill.startup.machine.device import name_rounding

if TYPE_CHECKING:
    from tokenmill.engine.transfer.connector import KVConnector
    from tokenmill.startup.assembly.kv_sources import Connection


class KVTransfers(Capability):
    """Connects the sources once steps run, and hands their orders to them with each plan."""

    _connection: Connection
    _connector: KVConnector

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    @classmethod
    def check(cls, config: EngineConfig, architecture: Architecture, platform: Platform) -> None:
        """Refuse ranks whose KV rank 0 cannot reach."""
        if platform.is_accelerator and config.num_ranks > 1 and config.has_kv_sources:
            raise InvalidConfig("KV of several GPUs is not stored yet: leave out --kv-disk and --slot-save-path")

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Connect sources if the config names any; import none of their code else."""
        return cls(assembly) if assembly.config.has_kv_sources else None

    def settle(self, header: LogHeader, memory: StepMemory, executor: Executor) -> LogHeader:
        """Connect the sources, and add which of them store."""
        from tokenmill.startup.assembly.kv_sources import connect

        config, platform, model = self._assembly.config, self._assembly.platform, self._assembly.model
        uses_torch = native_pass_obstacle(model.decoder, model.attention.name) is not None
        rounding = name_rounding(model.kernels, platform.device, uses_torch)
        whose = f"{self._assembly.limits.fingerprint}/{rounding}"
        if model.draft is not None:  # its KV goes with the pages
            whose += f"/{fingerprint(model.draft.folder)}"
        of_others = () if model.group is None else model.group.kv_of_others()
        self._connection = connect(config, platform, memory, model.attention.name, whose, of_others)
        return self._connection.with_settings(header)

    def engine_extensions(self, scheduler: EngineScheduler) -> Sequence[EngineExtension]:
        """Open the connector between the sources and this scheduler."""
        from tokenmill.engine.transfer.extension import KVTransfer

        self._connector = self._connection.open_connector(scheduler)
        actions = self._connection.slot_actions(self._assembly.config, scheduler)
        return (KVTransfer(scheduler, self._connector), *actions)

    def executor(self, executor: Executor) -> Executor:
        """Return an executor that hands the orders of each plan to the connector."""
        from tokenmill.engine.transfer.extension import TransferExecutor

        return TransferExecutor(executor, self._connector)

    def describe(self, ready: EngineReady, memory: StepMemory) -> None:
        """Tell whether clients may send parameters to the sources."""
        ready.takes_transfer_params = self._connection.takes_params


class KVEvents(Capability):
    """The engine's process publishes the events; see `Engine.take_kv_events`."""

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Turn events on if the config publishes them."""
        return None if assembly.config.kv_events() is None else cls()

    def engine_extensions(self, scheduler: EngineScheduler) -> tuple[EngineExtension, ...]:
        """Give the cache its log; the loop itself has nothing to do."""
        scheduler.kv.cache.events = KVEventLog()
        return ()
