"""`Capability`: all that a feature brings to an engine, from what it refuses to its line on the start-up screen.

    check ─> load weights ─> install ─> size, allocate ─> row_extensions, complete ─> warm up ─> settle
    ─> resources, engine_extensions, executor, gates ─> describe

`install` decides whether an engine has the capability. The other hooks do nothing unless a subclass overrides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from tokenmill.config.configs import EngineConfig
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.extension import EngineExtension
from tokenmill.engine.loop.engine import ModelLimits
from tokenmill.engine.loop.gates import Gate
from tokenmill.engine.loop.step_log import LogHeader
from tokenmill.engine.runner.executor import Executor
from tokenmill.engine.runner.model_runner import ModelRunner
from tokenmill.engine.scheduler.resources.resource import Resource
from tokenmill.engine.scheduler.scheduler import EngineScheduler
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.attention.row_extension import RowExtension
from tokenmill.model.sampling.grammar_rows import GrammarRows
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.loading import LoadedModel, StartupTimer
from tokenmill.startup.assembly.memory import StepMemory
from tokenmill.startup.sizing.kv_size import KVSize


@dataclass(slots=True)
class Assembly:
    """An engine that is being built, as far as it is known.

    Attributes:
        config: resolved; a capability may settle what depends on the model.
        limits: `max_model_len` is what was asked for, until the KV cache has its size.
        new_grammar_rows: makes the grammars of a runner's rows.
        capabilities: those that the engine has, in the order of the list.
    """

    config: EngineConfig
    platform: Platform
    timer: StartupTimer
    model: LoadedModel
    limits: ModelLimits
    new_grammar_rows: Callable[[], GrammarRows] = GrammarRows.without_grammars
    capabilities: list[Capability] = field(default_factory=list)

    def install(self, kinds: Sequence[type[Capability]]) -> None:
        """Install those of these capabilities that the config and the model ask for."""
        for kind in kinds:
            capability = kind.install(self)
            if capability is not None:
                self.capabilities.append(capability)

    def sized(self, size: KVSize) -> KVSize:
        """Return the size of the memory of steps with what all capabilities take of it."""
        for capability in self.capabilities:
            size = capability.sized(size)
        return size

    def resources(self) -> Iterator[Resource]:
        """Return the resources of all capabilities."""
        return (resource for capability in self.capabilities for resource in capability.resources())

    def gates(self) -> Iterator[Gate]:
        """Return the gates of all capabilities."""
        return (gate for capability in self.capabilities for gate in capability.gates())

    def row_extensions(self, memory: StepMemory) -> list[RowExtension]:
        """Return the row extensions of all capabilities, for a runner with this memory."""
        return [extension for capability in self.capabilities for extension in capability.row_extensions(memory)]


class Capability:
    """A capability of one engine.

    Attributes:
        reserved_bytes: memory that its work will take besides weights and KV.
    """

    reserved_bytes = 0

    @classmethod
    def check(cls, config: EngineConfig, architecture: Architecture, platform: Platform) -> None:
        """Refuse features that do not go together, before weights are read.

        Raises:
            InvalidConfig: the config asks for such features.
        """

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Return the capability of an engine whose weights are in memory; None: this engine does without."""
        return cls()

    def sized(self, size: KVSize) -> KVSize:
        """Return the size of the memory of steps with what this capability takes of it."""
        return size

    def gates(self) -> Sequence[Gate]:
        """Return the events that requests may have to wait for."""
        return ()

    def row_extensions(self, memory: StepMemory) -> Sequence[RowExtension]:
        """Return its parts of a runner's rows. Called for each runner: one measures the largest step, one stays."""
        return ()

    def complete(self, runner: ModelRunner, memory: StepMemory) -> None:
        """Add to a runner what the rows cannot hold."""

    def settle(self, header: LogHeader, memory: StepMemory, executor: Executor) -> LogHeader:
        """Return the header with what schedulers have to know, also those of replays. Steps can be run and measured."""
        return header

    def resources(self) -> Sequence[Resource]:
        """Return what requests hold while they run, besides the resources that the header's settings ask for."""
        return ()

    def engine_extensions(self, scheduler: EngineScheduler) -> Sequence[EngineExtension]:
        """Return its parts of the engine's loop."""
        return ()

    def executor(self, executor: Executor) -> Executor:
        """Return an executor that also does this capability's part of a plan."""
        return executor

    def describe(self, ready: EngineReady, memory: StepMemory) -> None:
        """Tell the other processes."""
