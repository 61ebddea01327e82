"""Runners of stages on devices: several steps run at a time, each in another stage.

first    post plan | tables, layers ─┐ hand on, next plan | take outputs, sample
later              | tables,         └─> layers ─> hand on

Only the first stage samples. Where it has several ranks, these must issue their work in one order, so its rank 0 tells
the others when it takes the outputs of a step. Later stages need no tokens: they begin with hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from tokenmill.core.plan import StepOutcome, StepPlan, StepResult
from tokenmill.engine.parallel.devices.stage_model import StageModel
from tokenmill.engine.parallel.messages import RunStep, TakeOutputs
from tokenmill.engine.parallel.shared_memory import SharedMemory
from tokenmill.engine.runner.captured_decodes import CapturedDecodes
from tokenmill.engine.runner.cuda_graphs import LARGEST
from tokenmill.engine.runner.device_runner import DeviceRunner
from tokenmill.engine.runner.model_runner import EnteredStep
from tokenmill.engine.runner.samples import Samples
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.row_extension import RowExtension, Sent
from tokenmill.platform.capturing import Report
from tokenmill.platform.protocol import Platform, Stream, Tensors


class CapturedLayers(CapturedDecodes):
    """Graphs of a stage's layers for steps that are all decodes. What travels between stages is in none of them.

    Args:
        is_first: they begin with the token table; else with hidden states.
        wait_for_all: waits until all ranks have come, as long as a start may take.
        parts: see `CapturedDecodes`.
    """

    def __init__(
        self,
        is_first: bool,
        wait_for_all: Callable[[], None],
        platform: Platform,
        stream: Stream,
        model: StageModel,
        *parts: Any,
    ) -> None:
        super().__init__(platform, stream, model, *parts)
        self._stage = model
        self._wait_for_all = wait_for_all
        self._given: torch.Tensor | None = None
        if not is_first:
            with stream:
                self._given = model.empty(LARGEST).zero_()

    def capture(self, report: Report = lambda done, total: None, count: int | None = None) -> int:
        """Capture all sizes, or the largest `count`, and wait until the other stages have theirs; return the number."""
        num_graphs = super().capture(report, count)
        self._wait_for_all()  # what a step is waited for may be less
        return num_graphs

    def run(self, samples: Samples, sent: Sent) -> torch.Tensor:
        """Run the layers over a step whose arrays `fit`; return what is handed on, in memory of its own."""
        num = len(samples)
        if self._given is not None:
            self._stage.receive(self._given[:num])
        (hidden,) = self._replay(samples, sent, num)
        return hidden.clone()  # the next replay overwrites it, while it may be on its way still

    def _outputs_of(self, batch: ForwardBatch, draws: torch.Tensor, extensions: Sequence[RowExtension]) -> Tensors:
        # Layers write to what they are given; rows that pad a step keep theirs.
        hidden = None if self._given is None else self._given[: len(draws)].clone()
        return (self._stage.layers(batch, self._attention, hidden),)


class FirstStageRunner(DeviceRunner):
    """Runner of a rank of the first stage. A step is sampled when its outcome is asked for; see `PipelinedRunner`.

    Args:
        memory: by which rank 0 posts plans.
    """

    model: StageModel
    graphs: CapturedLayers | None

    def __init__(self, memory: SharedMemory, *parts: Any) -> None:
        super().__init__(*parts)
        self._memory = memory
        self._leads = memory.shard.rank == 0

    @torch.inference_mode()
    def start(self, plan: StepPlan, previous: StepOutcome | None) -> Callable[[], StepResult]:
        """Start a step by running the first layers; return a function that waits for the outputs and samples."""
        with self._memory.together():
            if self._leads:
                self._memory.post(RunStep.from_plan(plan))
            step = self._enter(plan)
            with self._transport:
                self._rows.apply(plan, step.sent)
                number, outputs = self.model.begin_pass(self._layers(step), len(step.wanted.indices))
        return partial(self._finish, step, number, outputs)

    def _layers(self, step: EnteredStep) -> torch.Tensor:
        if step.has_rest:
            return self.model.layers(self._batch(step), self._attention)
        assert self.graphs is not None, "what is captured has a graph"
        return self.graphs.run(step.samples, step.sent)

    @torch.inference_mode()
    def _finish(self, step: EnteredStep, number: int, outputs: Callable[[], torch.Tensor]) -> StepResult:
        with self._memory.together():
            if self._leads:
                self._memory.post(TakeOutputs(number))
            with self._transport:
                # Graphs have layers only: all that a step samples is sampled here.
                finish = self._sample(msgspec.structs.replace(step, num_captured=0), outputs(), None)
        return finish()


class LaterStageRunner(DeviceRunner):
    """Runner of a rank of another stage than the first, for which nobody waits: its outputs are the first one's."""

    model: StageModel
    graphs: CapturedLayers | None

    @torch.inference_mode()
    def start(self, plan: StepPlan, previous: StepOutcome | None) -> Callable[[], StepResult]:
        """Start a step; return a function that waits until its layers have run, and returns no tokens."""
        step = self._enter(plan)
        with self._transport:
            self._rows.apply(plan, step.sent)
            if step.has_rest:
                given = self.model.receive(self.model.empty(int(step.samples.query_starts[-1])))
                hidden = self.model.layers(self._batch(step), self._attention, given)
            else:
                assert self.graphs is not None, "what is captured has a graph"
                hidden = self.graphs.run(step.samples, step.sent)
            self.model.hand_on(hidden)
            done = self._transport.finish_step()

        def finish() -> StepResult:
            done.wait()
            return StepResult(plan.step, np.zeros(0, np.int32), np.zeros(len(plan.rows) + 1, np.int32))

        return finish
