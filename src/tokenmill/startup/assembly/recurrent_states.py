"""Recurrent states: layers that keep a state of fixed size instead of KV."""

from __future__ import annotations

from typing import Self

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.core.engine_messages import EngineReady
from tokenmill.engine.runner.row_recurrences import RowRecurrences
from tokenmill.engine.speculation.draft_states import DraftStates, Replay
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.attention.row_extension import RowExtension
from tokenmill.model.models.host_model import replay_on_host
from tokenmill.platform.arrays import ArrayLibrary
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.memory import StepMemory
from tokenmill.startup.sizing.kv_size import KVSize
from tokenmill.startup.sizing.state_size import check_recurrences, num_states, with_states


class RecurrentStates(Capability):
    """Each running request has a slot for its state; prefixes keep states too."""

    def __init__(self, num_slots: int, arrays: ArrayLibrary, replay: Replay) -> None:
        self._num_slots = num_slots
        self._arrays = arrays
        self._replay = replay

    @classmethod
    def check(cls, config: EngineConfig, architecture: Architecture, platform: Platform) -> None:
        """Refuse sources of the user's own that do not serve recurrent states."""
        check_recurrences(config, architecture)

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Decide how much memory states have, which bounds the rows; see `with_states`."""
        architecture, platform = assembly.model.architecture, assembly.platform
        if not architecture.recurrences:
            return None
        assembly.config = with_states(assembly.config, architecture, platform.available_bytes())
        decoder = assembly.model.decoder
        replay = decoder.replay if platform.is_accelerator else replay_on_host(decoder, assembly.model.kernels)
        return cls(num_states(assembly.config, architecture), platform.arrays, replay)

    def sized(self, size: KVSize) -> KVSize:
        """Add the slots of states."""
        return msgspec.structs.replace(size, num_states=self._num_slots)

    def row_extensions(self, memory: StepMemory) -> tuple[RowExtension, ...]:
        """Return the slots of rows, and what takes states on with right drafts."""
        assert memory.states is not None, "states have a size, and no memory"
        rows = RowRecurrences(memory.states, len(memory.tables.tokens), self._arrays)
        return rows, DraftStates(memory.states, self._arrays, self._replay)

    def describe(self, ready: EngineReady, memory: StepMemory) -> None:
        """Tell how many states there is room for."""
        assert memory.states is not None, "states have a size, and no memory"
        ready.num_states, ready.state_bytes = self._num_slots, memory.states.num_bytes
