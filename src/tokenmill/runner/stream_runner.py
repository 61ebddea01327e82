"""`StreamRunner`: steps on a device with a queue of its own. The host issues a step and comes back for its result.

    copies    |arrays N+1|             |arrays N+2|
    compute   |forward N, sample, tokens to the table|event|forward N+1 ...
    host      plan N+1, send, issue    wait for N's event, commit

The host waits for one event per step and for nothing else, unless a request asks for what only the host can do: the
masks of a grammar (it has to know the token before), reports on prompts.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.attention.batch import DeviceLens, ForwardBatch
from tokenmill.attention.paged import PagedAttention
from tokenmill.kernels.triton.sampling import Draws, sample
from tokenmill.platform.protocol import Platform, Tensors
from tokenmill.runner.cuda_graphs import DecodeGraphs, Report
from tokenmill.runner.inputs import build_batch, step_arrays
from tokenmill.runner.model_runner import Model, ModelRunner
from tokenmill.runner.pending_step import PendingStep
from tokenmill.runner.prompt_reports import Reports
from tokenmill.runner.results import result_of, sampling_rows
from tokenmill.runner.row_tables import RowTables, table_arrays
from tokenmill.runner.staging import Staging
from tokenmill.sampling.grammar_rows import GrammarRows, GrammarStep
from tokenmill.sampling.logprobs import LogprobTensors, take_logprobs
from tokenmill.sampling.sampler import process
from tokenmill.sampling.table import SamplingTable
from tokenmill.scheduler.plan import StepPlan, StepResult

# The inputs of a decode, 8 bytes each: its row and position, then its draw.
NUM_FIELDS = 8


class StreamRunner(ModelRunner):
    """See `ModelRunner`. The last row of the tables belongs to nobody: it is what graphs are padded with."""

    attention: PagedAttention

    def __init__(
        self,
        model: Model,
        attention: PagedAttention,
        tables: RowTables,
        sampling: SamplingTable,
        grammars: GrammarRows,
        platform: Platform,
    ) -> None:
        super().__init__(model, attention, tables, sampling, grammars)
        self._stream = platform.stream()
        self._staging = Staging(platform, self._stream)
        self._platform = platform
        self._graphs: DecodeGraphs | None = None
        self._previous: PendingStep | None = None

    @property
    def can_capture(self) -> bool:
        """Whether the attention's plans of decodes can be captured."""
        return self.attention.is_capturable

    @torch.inference_mode()
    def capture(self, report: Report = lambda done, total: None) -> int:
        """Capture decode steps as graphs; returns how many.

        Raises:
            InvalidConfig: no memory is left for them.
        """
        padding = np.zeros(NUM_FIELDS, dtype=np.int64)
        padding[:2] = len(self.tables.pages) - 1, 1
        padding[4] = np.float64(1.0).view(np.int64)
        self._graphs = DecodeGraphs(self._platform, self._stream, self._decode, padding, len(self.tables.pages) - 1)
        self._graphs.capture(report)
        return self._graphs.num_graphs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Issue a step. Steps run in the order of their launch; the result raises what its step raised."""
        try:
            if self._has_failed:
                raise RuntimeError("a step before this one failed")
            self._has_failed = True
            pending = self._issue(plan)
            self._has_failed = False
        except Exception as error:
            pending = PendingStep.failed(error)
        self._previous = pending
        return pending

    def _issue(self, plan: StepPlan) -> PendingStep:
        self._set_rows(plan)
        wanted = self.prompts.outputs_of(plan)
        rows, positions = sampling_rows(plan)
        arrays = {**table_arrays(plan), "draws": decode_inputs(self.sampling, rows, positions)}
        padded = None
        if self._graphs is not None and len(rows) == plan.num_tokens and not wanted.spans:
            padded = self._graphs.padded(arrays["draws"])
        if padded is not None:
            arrays["draws"] = padded
        else:
            arrays |= step_arrays(plan, wanted.indices)
            arrays["samples"] = wanted.samples
        sent = self._staging.send(arrays)
        with self._stream:
            self.tables.apply(plan, sent)
            reports = Reports({}, {})
            if padded is not None:
                assert self._graphs is not None
                logits, token_ids = (part[: len(rows)] for part in self._graphs.run(sent["draws"]))
            else:
                outputs = self.model.forward(build_batch(arrays, sent, self.tables), self.attention)
                if wanted.spans:
                    reports = self.prompts.take(plan, wanted.spans, outputs, self.tables, self.model.logits)
                    outputs = outputs[sent["samples"]]
                if not len(rows):
                    return self._pending(plan, reports, None)
                logits = self.model.logits(outputs)
                token_ids = self._draw(logits, sent["draws"])
            logprobs, constrained = None, None
            if self.sampling.needs_processing(rows, positions) or self.grammars.concerns(rows):
                constrained = self._masks(rows, positions)
                batch = self.sampling.batch(rows, positions)
                if constrained is not None:
                    batch = dataclasses.replace(batch, allowed=constrained.ready(logits.device))
                token_ids = self._draw(process(logits, batch, self.tables.tokens), sent["draws"][:, : len(rows)])
                if batch.logprobs is not None:
                    logprobs = take_logprobs(logits, token_ids, batch.logprobs)
            return self._pending(plan, reports, token_ids, logprobs, constrained)

    def _pending(
        self,
        plan: StepPlan,
        reports: Reports,
        token_ids: torch.Tensor | None,
        logprobs: LogprobTensors | None = None,
        constrained: GrammarStep | None = None,
    ) -> PendingStep:
        """The end of a step: what is issued last, and what remains to be done when the device is through."""
        fetched = None if token_ids is None else self._staging.fetch(token_ids)
        done = self._staging.finish()

        def finish() -> StepResult:
            done.wait()
            if fetched is None:
                return result_of(plan, reports)
            own_ids = fetched.numpy().astype(np.int32)
            failures = {} if constrained is None else constrained.take(own_ids)
            return result_of(plan, reports, own_ids, logprobs, failures)

        return PendingStep(finish)

    def _masks(self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> GrammarStep | None:
        """The grammars of these rows, once they have the tokens of the step before: here the host has to wait."""
        if self._previous is not None and self.grammars.concerns(rows):
            self._previous.exception()
        return self.grammars.step(rows, positions)

    def _draw(self, logits: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
        """Sample from logits [S, V] and enter the tokens into the table, where the next step finds them."""
        numbers = fields[4:].view(torch.float64)
        token_ids = sample(logits, Draws(fields[2], fields[3], *numbers))
        self.tables.write_tokens(fields[0], fields[1], token_ids)
        return token_ids

    def _decode(self, fields: torch.Tensor) -> Tensors:
        """A whole decode step of n rows: what a graph holds. Lengths stay on the device."""
        rows, after = fields[0], fields[1]
        n, page_size = len(rows), self.tables.page_size
        positions = after - 1
        page_table = self.tables.pages.index_select(0, rows)
        page = page_table.gather(1, (positions // page_size)[:, None]).squeeze(1).long()
        every = np.arange(n + 1, dtype=np.int32)
        indices = torch.arange(n + 1, device=rows.device)
        batch = ForwardBatch(
            token_ids=self.tables.tokens[rows, positions].long(),
            positions=positions,
            slots=page * page_size + positions % page_size,
            page_table=page_table,
            query_lens=np.ones(n, dtype=np.int32),
            context_lens=np.full(n, self.tables.tokens.shape[1], dtype=np.int32),
            query_starts=every,
            output_indices=indices[:n],
            lens=DeviceLens(after.to(torch.int32), indices.to(torch.int32)),
        )
        logits = self.model.logits(self.model.forward(batch, self.attention))
        return logits, self._draw(logits, fields)


def decode_inputs(
    sampling: SamplingTable, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """[NUM_FIELDS, S] int64: row, position of the sampled token, kind of draw, top-k, then float64 bits of
    temperature, top-p, min-p and the uniform number."""
    draws = sampling.draws(rows, positions)
    numbers = np.stack([draws.temperature, draws.top_p, draws.min_p, draws.uniform]).view(np.int64)
    return np.concatenate([np.stack([rows, positions, draws.kind, draws.top_k]), numbers])
