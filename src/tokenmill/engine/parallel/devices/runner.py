"""Runners of ranks on devices: rank 0 posts each plan before it runs it; the others take the tokens it has sampled.

rank 0    post plan | tables, forward, logits together, sample ─┐ share the tokens, table
others              | tables, forward, logits together, ────────┴ take the tokens, table
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.core.errors import EngineFailed
from tokenmill.core.plan import AdmittedRequest, StepOutcome, StepPlan, StepResult
from tokenmill.engine.parallel.devices.collective import DeviceCollective
from tokenmill.engine.parallel.messages import RunStep
from tokenmill.engine.parallel.shared_memory import SharedMemory
from tokenmill.engine.runner.device_runner import DeviceRunner
from tokenmill.engine.runner.device_sampler import DeviceSampler
from tokenmill.engine.runner.model import Model
from tokenmill.engine.runner.row_tables import RowTables
from tokenmill.engine.runner.samples import Samples
from tokenmill.engine.runner.step_sampler import Masks, Sampled
from tokenmill.model.attention.row_extension import Sent
from tokenmill.model.sampling.grammar_rows import GrammarRows
from tokenmill.model.sampling.reference import draw
from tokenmill.model.sampling.state import SamplingMetadata
from tokenmill.platform.communicator import Communicator
from tokenmill.platform.protocol import Event, Stream

# Between two looks at a device that computes, and at the other ranks.
PAUSE_SECONDS = 50e-6


class LeadingRunner(DeviceRunner):
    """Runner of rank 0. `memory`: shared memory to which it posts its plans."""

    def __init__(self, memory: SharedMemory, *parts: Any) -> None:
        super().__init__(*parts)
        self._memory = memory

    def start(self, plan: StepPlan, previous: StepOutcome | None) -> Callable[[], StepResult]:
        """Post a plan and start its step. A step that cannot be started ends all ranks: they have begun it."""
        with self._memory.together():
            self._memory.post(RunStep.from_plan(plan))
            return super().start(plan, previous)


class FollowedGrammars(GrammarRows):
    """Tracks which rows have grammars; rank 0 has the grammars themselves."""

    def __init__(self) -> None:
        super().__init__(lambda text: None, 0)
        self._with_grammars: set[int] = set()

    def set(self, new_rows: Iterable[AdmittedRequest]) -> None:
        """Note which new rows have a grammar."""
        for new in new_rows:
            self._with_grammars.discard(new.row)
            if new.params.grammar is not None:
                self._with_grammars.add(new.row)

    def concerns(self, rows: npt.NDArray[np.integer]) -> bool:
        """Return True if any of these rows has a grammar."""
        return not self._with_grammars.isdisjoint(rows.tolist())


class FollowingSampler(DeviceSampler):
    """Takes the tokens that rank 0 has sampled, as often as rank 0 samples.

    Args:
        share: receives the tokens from rank 0; see `Communicator`.
    """

    def __init__(
        self, model: Model, tables: RowTables, share: Callable[[torch.Tensor], torch.Tensor], grammars: GrammarRows
    ) -> None:
        super().__init__(model, tables, draw, share)
        self._grammars = grammars

    def draw(self, logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Take the tokens that rank 0 has drawn, and enter them into the table."""
        return self.enter(draws.new_empty(len(draws)), draws)

    def sample_drawn(
        self,
        logits: torch.Tensor,
        drawn: torch.Tensor,
        samples: Samples,
        metadata: SamplingMetadata,
        sent: Sent,
        masks: Masks,
    ) -> Sampled:
        """Take the tokens of rank 0's second draw if it makes one; else keep `drawn`."""
        if not metadata.needs_processing and not self._grammars.concerns(samples.rows):
            return Sampled(drawn)
        if samples.drafts is not None:
            self.tables.write_drafts(sent)
        return Sampled(self.enter(torch.empty_like(drawn), sent["draws"]))


class WatchedEvent:
    """An event that checks on the other ranks while the host waits, since the device may wait for them.

    Args:
        channel: by which the devices are connected; aborted when ranks are given up.
    """

    def __init__(self, event: Event, memory: SharedMemory, channel: Communicator | DeviceCollective) -> None:
        self._event = event
        self._memory = memory
        self._channel = channel

    def is_past(self) -> bool:
        """Return True if the work before it is done."""
        return self._event.is_past()

    def wait(self) -> None:
        """Let the host wait until the work before it is done, and check on the other ranks meanwhile.

        Raises:
            EngineFailed: another rank is gone or has not come in time.
        """
        since = time.monotonic()
        try:
            while not self._event.is_past():
                self._memory.look(since)
                time.sleep(PAUSE_SECONDS)
        except EngineFailed:
            self._channel.abort()  # or the device would wait for ever
            raise
        self._event.wait()


class WatchedStream:
    """A stream whose events are watched."""

    def __init__(self, stream: Stream, memory: SharedMemory, channel: Communicator | DeviceCollective) -> None:
        self._stream = stream
        self._memory = memory
        self._channel = channel

    def __enter__(self) -> Self:
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)

    def record(self) -> Event:
        """Return a watched event behind the work issued so far."""
        return WatchedEvent(self._stream.record(), self._memory, self._channel)

    def wait_for(self, event: Event) -> None:
        """Start later work of this stream only after an event of another one."""
        self._stream.wait_for(event)
