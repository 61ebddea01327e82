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
        pieces: the memory of pages, [n, num_pages, ...] each. window_pieces: of those in the window group.
    """

    def __init__(self, pieces: Sequence[Array], window_pieces: Sequence[Array] = ()) -> None:
        self._pieces = tuple(pieces), tuple(window_pieces)

    def apply(self, plan: StepPlan, sent: Sent) -> None:
        """Copy one page after the other, on the device."""
        if plan.page_copies is None:
            return
        pairs = plan.page_copies.reshape(-1, 2, plan.page_copies.shape[1])
        for pieces, copies in zip(self._pieces, pairs, strict=False):
            for source, target in copies.T.tolist():
                for piece in pieces:
                    piece[:, target] = piece[:, source]


class PartialHits(Capability):
    """Prompts that differ inside a page begin there, where pages are so large that this saves a default page or more.

    Not where a state goes with the pages, nor where ranks have parts of them.
    """

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Take part if pages are larger than what is worth a copy."""
        config, model = assembly.config, assembly.model
        is_whole = config.num_ranks == 1 and model.architecture.needs_kv and not model.architecture.recurrences
        return cls() if config.enable_prefix_caching and is_whole and config.page_size > LEAST_TOKENS else None

    def row_extensions(self, memory: StepMemory) -> Sequence[RowExtension]:
        """Return what copies pages."""
        return [CopiedPages(memory.full_kv[1], memory.window_kv[1])]

    def settle(self, header: LogHeader, memory: StepMemory, executor: Executor) -> LogHeader:
        """Let the scheduler order copies, in replays too."""
        return msgspec.structs.replace(header, least_copied=LEAST_TOKENS)
