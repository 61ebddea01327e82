"""`ModelRunner`: what a step is, the same on every device. Knows nothing of requests beyond their rows.

    plan ─> arrays ─> send ─> forward ─> sample, tokens to the table ─> fetch ─> result

What differs between devices are its parts: the transport, the sampler, graphs. Where and when it happens is the
executor's. On a device with a queue of its own:

    copies    |arrays N+1|             |arrays N+2|
    compute   |forward N, sample, tokens to the table|event|forward N+1 ...
    host      plan N+1, send, issue    wait for N's event, commit

The host waits for one event per step and for nothing else, unless a request asks for what only the host can do: the
masks of a grammar (it has to know the token before), reports on prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from tokenmill.attention.protocol import AttentionBackend
from tokenmill.core.plan import StepOutcome, StepPlan, StepResult
from tokenmill.runner.inputs import build_batch, step_arrays
from tokenmill.runner.model import Model
from tokenmill.runner.prompt_reports import OutputTokens, Reports
from tokenmill.runner.results import result_of
from tokenmill.runner.row_state import RowState
from tokenmill.runner.samples import Samples
from tokenmill.runner.step_sampler import StepSampler
from tokenmill.runner.transport import Arrays, Transport
from tokenmill.sampling.grammar_rows import GrammarStep

if TYPE_CHECKING:
    from tokenmill.runner.captured_decodes import CapturedDecodes
    from tokenmill.speculation.draft_model import DraftModel


class ModelRunner:
    """Steps of one model over the rows of one device.

    Attributes:
        graphs: captured decodes, where there are any.
        draft_model: proposes what may follow each step, where there is one.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        rows: RowState,
        sampler: StepSampler,
        transport: Transport,
        graphs: CapturedDecodes | None = None,
        takes_parts: bool = True,
    ) -> None:
        """
        Args:
            takes_parts: decodes in front of prompts run in a graph of their own; else a step with prompts is one pass.
        """
        self.model = model
        self.graphs = graphs
        self.draft_model: DraftModel | None = None
        self._takes_parts = takes_parts
        self._attention = attention
        self._rows = rows
        self._sampler = sampler
        self._transport = transport

    @torch.inference_mode()
    def start(self, plan: StepPlan, previous: StepOutcome | None) -> Callable[[], StepResult]:
        """Start a step behind the previous one; returns what waits for its end and puts the result together."""
        rows, transport, samples = self._rows, self._transport, Samples.of(plan)
        arrays = rows.enter(plan, samples)
        metadata = rows.sampling.select(samples.rows, samples.positions)
        arrays["draws"] = metadata.draws
        wanted = rows.prompts.outputs_of(plan, samples)
        num_captured = self._num_captured(plan, samples, wanted, arrays)
        has_rest = num_captured < len(plan.rows)
        if has_rest:
            arrays |= step_arrays(plan, samples, wanted, num_captured)
        sent, reports, outputs, sampled = transport.send(arrays), Reports(), None, None
        masks = partial(self._masks, samples, previous)
        with transport:
            rows.tables.apply(plan, sent)
            if has_rest:
                batch = build_batch(arrays, sent, rows.tables)
                if rows.adapters is not None:
                    batch = replace(batch, adapters=rows.adapters.rows_of(plan))
                if rows.encoder is not None:
                    batch = replace(batch, media=rows.encoder.add_to(batch, plan))
                outputs = self.model.forward(batch, self._attention)
                if wanted.spans:
                    reports = rows.prompts.take(plan, wanted.spans, outputs, rows.tables, self.model.logits)
                    outputs = outputs[sent["samples"]]
            if num_captured and self.graphs is not None:
                sampled = self.graphs.sample(samples, metadata, sent, masks, outputs)
            elif outputs is not None and len(samples):
                sampled = self._sampler.sample(outputs, samples, metadata, sent, masks)
            on_host = None if sampled is None else sampled.on_host(transport)
            done = transport.finish()

        def finish() -> StepResult:
            done.wait()
            result = result_of(plan, samples, reports, on_host)
            if self.draft_model is None:
                return result
            # What is there already a grammar forces, and that is more certain.
            return replace(result, proposals={**self.draft_model.propose(plan, result), **result.proposals})

        return finish

    def _num_captured(self, plan: StepPlan, samples: Samples, wanted: OutputTokens, arrays: Arrays) -> int:
        """How many requests at the front of a step run in a graph, whose draws are among the arrays then.

        Decodes in front of prompts do so alone, unless there are drafts or reports: those count places from the first
        request of the step, so it is one pass.
        """
        if self.graphs is None or wanted.spans:
            return 0
        is_decode = plan.num_samples == plan.num_scheduled
        num = len(is_decode) if is_decode.all() else int(is_decode.argmin())
        if num < len(is_decode) and (plan.draft_ids is not None or not self._takes_parts):
            return 0
        return num if num and self.graphs.fit(arrays, plan.num_samples[:num]) else 0

    def _masks(self, samples: Samples, previous: StepOutcome | None) -> GrammarStep | None:
        """The grammars of a step, once they have the tokens of the one before: here the host has to wait."""
        grammars = self._rows.grammars
        if not grammars.concerns(samples.rows):
            return None
        if previous is not None:
            previous.wait()
        return grammars.step(samples.rows, samples.positions, samples.drafts)

    def close(self) -> None:
        """End the threads of grammars, and let go of the graphs."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        self._rows.close()
