"""Run a rank other than the engine's first, in shared memory: take a message, do its part of it, wait for the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.config.configs import EngineConfig
from tokenmill.engine.parallel.messages import Command, End, FindBest, RunPass, TakeLogits
from tokenmill.engine.parallel.model import PartialModel, find_best, take_logits
from tokenmill.engine.parallel.pipeline.chain import LaterStage
from tokenmill.engine.parallel.pipeline.link import Bye, Pass, hidden_states
from tokenmill.engine.parallel.shared_memory import SharedMemory
from tokenmill.engine.runner.model import Hidden
from tokenmill.model.adapters.packing import FollowedAdapters
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.kernels.adapters import Adapter, AdapterSource
from tokenmill.model.models.host_model import on_host
from tokenmill.model.models.native_decoder import NativeDecoder
from tokenmill.platform.prefault import prefault
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.adapters import followed_adapters
from tokenmill.startup.assembly.capabilities import CHECKS
from tokenmill.startup.assembly.loading import Progress, StartupTimer, load, size_kv
from tokenmill.startup.ranks.group import Group

if TYPE_CHECKING:
    from tokenmill.model.kernels.heads import RotaryTables

# How long a rank without work sleeps at most before it looks around.
IDLE_SECONDS = 0.1


class Follower:
    """A rank that executes the commands of rank 0.

    Args:
        model, attention: its part of them.
        dtype: the name of the model's.
        adapters: its parts of the adapters; None: it has none.
        is_read: rank 0 reads its KV between two steps.
        rotary: its tables, where media turn by several axes; None: it has none.
        idle_work: advances by an iteration whenever there is nothing else to do.
    """

    def __init__(
        self,
        model: PartialModel,
        attention: AttentionBackend,
        memory: SharedMemory,
        dtype: str,
        idle_work: Iterator[None],
        adapters: FollowedAdapters | None = None,
        is_read: bool = False,
        rotary: RotaryTables | None = None,
    ) -> None:
        self._model = model
        self._attention = attention
        self._memory = memory
        self._dtype = dtype
        self._adapters = adapters
        self._is_read = is_read
        self._rotary = rotary
        self._idle_work: Iterator[None] | None = idle_work

    def run(self, on_iteration: Callable[[bool], None] = lambda has_work: None) -> None:
        """Follow until rank 0 ends.

        Args:
            on_iteration: called with True before each piece of work, and with False now and then while idle.

        Raises:
            EngineFailed: another rank is gone, has given up, or has not come in time.
        """
        with self._memory.together():
            while not isinstance(command := self._receive(self._patience()), End):
                on_iteration(command is not None)
                if command is not None:
                    self._obey(command)

    def _receive(self, timeout: float) -> Command | None:
        return self._memory.receive(timeout)

    def _patience(self) -> float:
        if self._idle_work is not None and next(self._idle_work, self) is self:
            self._idle_work = None
        return IDLE_SECONDS if self._idle_work is None else 0.0

    def _obey(self, command: Command) -> None:
        match command:
            case RunPass():
                self._run(command)
            case TakeLogits(count):
                take_logits(self._model, self._memory, self._memory.inputs(count, self._dtype))
            case FindBest(count):
                find_best(self._model, self._memory, self._memory.inputs(count, self._dtype))

    def _run(self, command: RunPass) -> Hidden:
        """Run the layers; in stages after the first, over the hidden states in shared memory."""
        batch, hidden = command.batch(self._find, self._rotary), None
        if not self._memory.shard.is_first_stage:
            hidden = self._memory.hidden(len(batch.token_ids), self._dtype).copy()  # where a pass may write
        hidden = self._model.forward(batch, self._attention, hidden)
        if self._is_read:
            self._memory.meet()
        return hidden

    def _find(self, sources: Sequence[AdapterSource]) -> tuple[Adapter, ...]:
        assert self._adapters is not None, "all ranks have adapters, or none has"
        return self._adapters.find(sources)


class StageLeader(Follower):
    """Rank 0 of a later stage: it takes commands from the stage before, gives them to its own ranks, and passes on
    their output.

    Args:
        stage: its end of the chain.
        others: see `Follower`.
    """

    def __init__(self, stage: LaterStage, *others: Any) -> None:
        super().__init__(*others)
        self._stage = stage
        self._begun: Pass | None = None

    def _receive(self, timeout: float) -> Command | None:
        received = self._stage.receive(timeout)
        if received is None:
            return None
        if isinstance(received, Bye):
            self._memory.post(End())
            self._stage.send_end()
            return End()
        self._begun, numbers = received
        like, size = self._memory.hidden(0, self._dtype), self._memory.layout.hidden_size
        hidden = hidden_states(numbers, like, size)
        self._memory.hidden(len(hidden), self._dtype)[:] = hidden
        self._memory.post(self._begun.run)
        return self._begun.run

    def _run(self, command: RunPass) -> Hidden:
        hidden = super()._run(command)
        assert self._begun is not None, "a pass has begun"
        self._stage.hand_on(self._begun, hidden)
        return hidden


def build_follower(
    config: EngineConfig, group: Group, platform: Platform, report: Progress = lambda *_: None
) -> Follower:
    """Load this rank's part of the model.

    Args:
        config: resolved, of this rank. platform: where it runs.

    Raises:
        InvalidCheckpoint, InvalidConfig, OutOfMemory: as when an engine is built.
        EngineFailed: another rank has failed.
    """
    timer = StartupTimer(report)
    config = dataclasses.replace(config, speculative_config=None)  # rank 0 drafts
    model = load(config, platform, timer, CHECKS, group)
    size = size_kv(config, platform, model)
    attention = model.attention.make(size.num_allocated, arrays=group.arrays)
    group.show_kv(attention.kv.pieces)
    is_asked_for = config.kv_cache_memory_bytes is not None or config.num_pages is not None
    is_asked_for &= group.context is None  # or each page lies with the rank that first writes it
    has_room = attention.kv.num_bytes <= platform.available_bytes()
    idle_work = prefault(attention.kv.pieces) if is_asked_for and has_room else iter(())
    decoder = on_host(model.decoder, attention)
    adapters = followed_adapters(config, model.decoder, model.kernels, isinstance(decoder, NativeDecoder))
    rotary = next(iter(model.decoder.rotary.values()), None)
    own = (decoder, attention, group.memory, model.kernels.dtype, idle_work, adapters, group.arrays is not None, rotary)
    return Follower(*own) if group.later_stage is None else StageLeader(group.later_stage, *own)
