"""Prefix hits that end inside a page: the equal beginning of a cached page is copied, not computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import msgspec

from tokenmill.core.plan import StepPlan
from tokenmill.engine.loop.step_log import LogHeader
from tokenmill.engine.runner.executor import Executor
from tokenmill.model.attention.row_extension import RowExtension, Sent
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.memory import StepMemory

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array

# A page of the default size: a copy that saves fewer tokens may cost as much as it saves.
LEAST_TOKENS = 16


class CopiedPages(RowExtension):
    """Copies pages before a step, with all that is kept of them: of each layer, scales, and what a draft model has.

    Args:
        pieces: the memory of pages, [n, num_pages, ...] each.
    """

    def __init__(self, pieces: Sequence[Array]) -> None:
        self._pieces = tuple(pieces)

    def apply(self, plan: StepPlan, sent: Sent) -> None:
        """Copy one page after the other, on the device."""
        if plan.page_copies is None:
            return
        for source, target in plan.page_copies.T.tolist():
            for piece in self._pieces:
                piece[:, target] = piece[:, source]


class PartialHits(Capability):
    """Prompts that differ inside a page begin there, where pages are so large that this saves a default page or more.

    Not where a page is more than one memory's: window groups, states, ranks.
    """

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Take part if pages are larger than what is worth a copy."""
        config, model = assembly.config, assembly.model
        is_one = config.num_ranks == 1 and model.window_obstacle is not None and not model.architecture.recurrences
        shares = config.enable_prefix_caching and model.architecture.needs_kv
        return cls() if shares and is_one and config.page_size > LEAST_TOKENS else None

    def row_extensions(self, memory: StepMemory) -> Sequence[RowExtension]:
        """Return what copies pages."""
        return [CopiedPages(memory.kv_pieces)]

    def settle(self, header: LogHeader, memory: StepMemory, executor: Executor) -> LogHeader:
        """Let the scheduler order copies, in replays too."""
        return msgspec.structs.replace(header, least_copied=LEAST_TOKENS)
