"""`ModelRunner`: executes a plan on one device. Knows nothing of requests beyond their rows."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.attention.batch import ForwardBatch
from tokenmill.attention.protocol import AttentionBackend
from tokenmill.runner.cuda_graphs import Report
from tokenmill.runner.inputs import build_batch, on_host, step_arrays
from tokenmill.runner.pending_step import LaunchedStep
from tokenmill.runner.prompt_reports import PromptReports, Reports
from tokenmill.runner.results import result_of, sampling_rows
from tokenmill.runner.row_tables import RowTables, table_arrays
from tokenmill.sampling.batch import SamplingBatch
from tokenmill.sampling.grammar_rows import GrammarRows, GrammarStep
from tokenmill.sampling.sampler import Review, SampledTokens, Sampler, SecondDraw
from tokenmill.sampling.table import SamplingTable
from tokenmill.scheduler.plan import StepPlan, StepResult

Rows = npt.NDArray[np.integer]


class Model(Protocol):
    """What the runner needs of a model."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """Final hidden states [S, hidden_size] of the batch's `output_indices`."""

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S, vocab_size] float32."""

    def argmax(self, outputs: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] -> [S] int64, the largest of the logits."""


class ModelRunner:
    """Owns the per-row state of a device that shares the host's memory, and runs steps on it, one after the other.

    `launch` with overlap returns at once and the step runs on a worker thread: torch releases the interpreter lock
    inside its kernels, so the engine schedules the next step meanwhile. Without overlap the step has run on return.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        tables: RowTables,
        sampling: SamplingTable,
        grammars: GrammarRows,
        overlap: bool = False,
    ) -> None:
        self.model = model
        self.attention = attention
        self.tables = tables
        self.sampling = sampling
        self.grammars = grammars
        self.prompts = PromptReports(len(tables.tokens), sampling.vocab_size)
        self.sampler = Sampler()
        self._has_failed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="runner") if overlap else None

    @property
    def can_capture(self) -> bool:
        """Whether `capture` has anything to capture: a queue of work, which a CPU has not."""
        return False

    def capture(self, report: Report) -> int:
        """Capture decode steps as graphs; returns how many there are."""
        raise NotImplementedError("steps run on the host")

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. Steps run in the order of their launch; the future raises what its step raised."""
        if self._worker is not None:
            return self._worker.submit(self.execute, plan)
        done: Future[StepResult] = Future()
        try:
            done.set_result(self.execute(plan))
        except Exception as error:
            done.set_exception(error)
        return done

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step from its differences to its sampled tokens.

        Raises:
            RuntimeError: a step before it failed and `recover` has not been called since.
        """
        if self._has_failed:
            raise RuntimeError("a step before this one failed")
        self._has_failed = True
        result = self._execute(plan)
        self._has_failed = False
        return result

    def recover(self) -> None:
        """Run plans again. Until then those behind a failed one are refused: their differences build on its."""
        self._has_failed = False

    def _execute(self, plan: StepPlan) -> StepResult:
        self._set_rows(plan)
        wanted = self.prompts.outputs_of(plan)
        arrays = {**table_arrays(plan), **step_arrays(plan, wanted.indices)}
        sent = on_host(arrays)
        self.tables.apply(plan, sent)
        outputs = self.model.forward(build_batch(arrays, sent, self.tables), self.attention)
        reports = Reports({}, {})
        if wanted.spans:
            reports = self.prompts.take(plan, wanted.spans, outputs, self.tables, self.model.logits)
            outputs = outputs[torch.from_numpy(wanted.samples).to(outputs.device)]
        if not plan.samples.any():
            return result_of(plan, reports)
        rows, positions = sampling_rows(plan)
        batch = self.sampling.batch(rows, positions)
        constrained = self.grammars.step(rows, positions)
        review = None
        if constrained is not None:
            batch = dataclasses.replace(batch, allowed=constrained.ready(self.tables.tokens.device))
            review = self._review(constrained, rows, positions)
        sampled = self._sample(outputs, batch, review)
        self.tables.write_tokens(torch.from_numpy(rows), torch.from_numpy(positions), sampled.token_ids)
        own_ids = sampled.token_ids.numpy().astype(np.int32)
        failures = {} if constrained is None else constrained.take(own_ids)
        return result_of(plan, reports, own_ids, sampled.logprobs, failures)

    def _set_rows(self, plan: StepPlan) -> None:
        """What the host keeps of new rows."""
        for new_row in plan.new_rows:
            self.sampling.set(new_row)
            self.prompts.set(new_row)
        self.grammars.set(plan.new_rows)

    def _sample(self, outputs: torch.Tensor, batch: SamplingBatch, review: Review | None) -> SampledTokens:
        if not batch.only_argmax or batch.allowed is not None:
            return self.sampler.sample(self.model.logits(outputs), batch, self.tables.tokens, review)
        # Nobody needs the logits themselves: kernels may find the largest without writing them down.
        token_ids = self.model.argmax(outputs)
        second = None if review is None else review(token_ids)
        if second is not None:
            self.sampler.sample_again(token_ids, self.model.logits(outputs[second.allowed.indices]), second)
        return SampledTokens(token_ids, None)

    def _review(self, constrained: GrammarStep, rows: Rows, positions: Rows) -> Review:
        """Lets the rows draw again whose grammar refuses what they drew."""

        def review(token_ids: torch.Tensor) -> SecondDraw | None:
            allowed = constrained.refused(token_ids.numpy())
            if allowed is None:
                return None
            again = allowed.indices.numpy()
            return SecondDraw(allowed, self.sampling.batch(rows[again], positions[again], stream=1))

        return review

    def close(self) -> None:
        """Wait for launched steps and end the worker thread."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        self.grammars.close()
