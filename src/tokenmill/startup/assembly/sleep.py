"""Sleep: an engine without requests gives the memory of its KV cache back to the machine, and goes on as if it had it.

Its pages are anonymous memory, which the system hands out page by page as it is written: let go of, they read as zeros,
as on the first day, and take memory again when a step writes to them. So nothing has to wake up. Weights that are
mapped from files need nothing done: the system drops them when others need the memory, and reads them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from tokenmill.core.extension import EngineExtension
from tokenmill.engine.loop.step_log import LogHeader
from tokenmill.engine.runner.executor import Executor
from tokenmill.engine.scheduler.scheduler import EngineScheduler
from tokenmill.platform.memory import GIVES_BACK, give_back, return_freed_memory
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.memory import StepMemory

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array


class SleepingMemory(EngineExtension):
    """Gives the memory of a KV cache back.

    Args:
        pieces: of `StepMemory.kv_pieces`.
    """

    def __init__(self, pieces: Sequence[Array]) -> None:
        self._pieces = tuple(pieces)

    def sleep(self) -> None:
        """Let go of all pages; no step is launched, and none of their contents is cached."""
        for piece in self._pieces:
            give_back(piece)
        return_freed_memory()


class Sleep(Capability):
    """An engine in one process, whose KV is this machine's memory and read by nobody else, can sleep.

    A step log would not know what was stored meanwhile, so that an engine with one does not.
    """

    _pieces: tuple[Array, ...] = ()

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Take part where the memory can be given back."""
        config = assembly.config
        is_shared = config.num_ranks > 1 or config.kv_source or config.kv_transfer_config
        is_elsewhere = assembly.platform.is_accelerator or config.step_log is not None
        return cls() if GIVES_BACK and not is_shared and not is_elsewhere else None

    def settle(self, header: LogHeader, memory: StepMemory, executor: Executor) -> LogHeader:
        """Note which memory it is."""
        self._pieces = memory.kv_pieces
        return header

    def engine_extensions(self, scheduler: EngineScheduler) -> Sequence[EngineExtension]:
        """Return the extension that gives it back."""
        return (SleepingMemory(self._pieces),)
