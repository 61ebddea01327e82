"""`ModelRunner`: run a step, the same way on every device. Knows nothing of requests beyond their rows.

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
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import StepOutcome, StepPlan, StepResult
from tokenmill.engine.runner.inputs import build_batch, step_arrays
from tokenmill.engine.runner.model import Hidden, Model, PipelinedModel
from tokenmill.engine.runner.prompt_reports import OutputTokens, Reports
from tokenmill.engine.runner.results import result_of
from tokenmill.engine.runner.row_state import RowState
from tokenmill.engine.runner.samples import Samples
from tokenmill.engine.runner.step_sampler import StepSampler
from tokenmill.engine.runner.transport import Transport
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.attention.row_extension import Arrays, Sent
from tokenmill.model.pooling.chain import PoolingChain
from tokenmill.model.sampling.grammar_rows import GrammarStep
from tokenmill.model.sampling.sampler import AdaptedHead
from tokenmill.model.sampling.state import SamplingMetadata

if TYPE_CHECKING:
    from tokenmill.engine.runner.captured_decodes import CapturedDecodes
    from tokenmill.engine.speculation.drafts import StepDrafter
    from tokenmill.platform.arrays import Array


class EnteredStep(msgspec.Struct, frozen=True):
    """A step that the row stores have taken in.

    Attributes:
        metadata: parameters of its samples. wanted: its tokens that have outputs.
        num_captured: requests at its front that run in a graph.
        arrays, sent: its data for the device, by name; on the host and on the device.
    """

    plan: StepPlan
    samples: Samples
    metadata: SamplingMetadata
    wanted: OutputTokens
    num_captured: int
    arrays: Arrays
    sent: Sent

    @property
    def has_rest(self) -> bool:
        """True if some of its requests run in no graph."""
        return self.num_captured < len(self.plan.rows)


class ModelRunner:
    """Runs the steps of one model over the rows of one device.

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
        self.draft_model: StepDrafter | None = None
        self._takes_parts = takes_parts
        self._attention = attention
        self._rows = rows
        self._sampler = sampler
        self._transport = transport

    def watch_prompt_logits(self, watch: Callable[[npt.NDArray[np.float32]], None]) -> None:
        """Let a function see the logits behind each prompt's log probabilities."""
        self._rows.prompts.watch = watch

    def pool_with(self, chain: PoolingChain) -> None:
        """Let a model's own layers follow its pooled states."""
        self._rows.prompts.pooled.chain = chain

    def start(self, plan: StepPlan, previous: StepOutcome | None) -> Callable[[], StepResult]:
        """Start a step behind the previous one; return a function that waits for its end and makes the result."""
        step = self._enter(plan)
        with self._transport:
            self._rows.apply(plan, step.sent)
            outputs = self.model.forward(self._batch(step), self._attention) if step.has_rest else None
            return self._sample(step, outputs, previous)

    def _enter(self, plan: StepPlan) -> EnteredStep:
        """Take in a plan, and send the arrays that it needs."""
        rows, samples = self._rows, Samples.from_plan(plan)
        arrays = rows.enter(plan, samples)
        metadata = rows.sampling.select(samples.rows, samples.positions)
        arrays["draws"] = metadata.draws
        wanted = rows.prompts.outputs_of(plan, samples)
        num_captured = self._num_captured(plan, samples, wanted, arrays)
        if num_captured < len(plan.rows):
            arrays |= step_arrays(plan, samples, wanted, num_captured)
        arrays |= rows.split(plan, samples.query_starts, num_captured)
        return EnteredStep(plan, samples, metadata, wanted, num_captured, arrays, self._transport.send(arrays))

    def _batch(self, step: EnteredStep) -> ForwardBatch:
        batch = build_batch(step.arrays, step.sent, self._rows.tables)
        return self._rows.extend(batch, step.plan, step.num_captured, step.arrays, step.sent)

    def _sample(
        self, step: EnteredStep, outputs: Hidden | None, previous: StepOutcome | None
    ) -> Callable[[], StepResult]:
        """Begin to sample from the model's outputs; return a function that waits for the end and makes the result.

        Args:
            outputs: model outputs of the tokens that are not in a graph; None: all are in one.
        """
        rows, samples, sent, reports, sampled = self._rows, step.samples, step.sent, Reports(), None
        masks = partial(self._masks, samples, previous)
        if outputs is not None and step.wanted.spans:
            reports = rows.prompts.report_prompts(step.plan, step.wanted.spans, outputs, rows.tables, self._logits_of)
            reports = reports.on_host(self._transport)
            outputs = outputs[sent["samples"]]
        if step.num_captured and self.graphs is not None:
            sampled = self.graphs.sample(samples, step.metadata, sent, masks, outputs)
            rows.decoded(sent)
        elif outputs is not None and len(samples):
            sampled = self._sampler.sample(outputs, samples, step.metadata, sent, masks)
        on_host = None if sampled is None else sampled.on_host(self._transport)
        drafter = self.draft_model
        propose = None if drafter is None else drafter.follow(step.plan, sent, self._transport.fetch)
        done = self._transport.finish_step()

        def finish() -> StepResult:
            done.wait()
            result = result_of(step.plan, samples, reports, on_host)
            with self._transport:
                for ended in rows.ended:
                    ended(step.plan, result)
            if propose is None:
                return result
            # What is there already a grammar forces, and that is more certain.
            proposals = {**propose(result), **result.proposals}
            return msgspec.structs.replace(result, proposals=proposals)

        return finish

    def _logits_of(self, row: int) -> Callable[[Hidden], Array]:
        """Return the head of a row: the model's, with what is added to it for the row."""
        additions = (head_of(row) for head_of in self._rows.heads)
        addition = next((one for one in additions if one is not None), None)
        return self.model.logits if addition is None else AdaptedHead(self.model, addition).logits

    def _num_captured(self, plan: StepPlan, samples: Samples, wanted: OutputTokens, arrays: Arrays) -> int:
        """Return how many requests at the front of a step run in a graph, and add their draws to the arrays.

        Decodes in front of prompts run in a graph alone, unless there are drafts or reports: these count places from
        the first request of the step, so it is one pass.
        """
        if self.graphs is None or wanted.spans:
            return 0
        is_decode = plan.num_samples == plan.num_scheduled
        num = len(is_decode) if is_decode.all() else int(is_decode.argmin())
        if num < len(is_decode) and (plan.draft_ids is not None or not self._takes_parts):
            return 0
        return num if num and self.graphs.fit(arrays, plan.rows[:num], plan.num_samples[:num]) else 0

    def _masks(self, samples: Samples, previous: StepOutcome | None) -> GrammarStep | None:
        """Return the grammars of a step, once they have the tokens of the one before: here the host has to wait."""
        grammars = self._rows.grammars
        if not grammars.concerns(samples.rows):
            return None
        if previous is not None:
            previous.wait()
        return grammars.step(samples.rows, samples.positions, samples.drafts)

    def close(self) -> None:
        """Close the stores of rows, and release the graphs."""
        if self.graphs is not None:
            self.graphs.close()
            self.graphs = None
        self._rows.close()


class PipelinedRunner(ModelRunner):
    """Runs steps of a model whose first layers run in this process: several at a time, each in another stage.

    Starting a step runs these layers. It is sampled when its outcome is asked for, which is in the order of the steps:
    no later one needs its tokens before, because a request runs again only when its token is known.
    """

    model: PipelinedModel

    def start(self, plan: StepPlan, previous: StepOutcome | None) -> Callable[[], StepResult]:
        """Start a step by running the first layers; return a function that waits for the outputs and samples."""
        step = self._enter(plan)
        self._rows.apply(plan, step.sent)
        outputs = self.model.begin_pass(self._batch(step), self._attention)
        return partial(self._finish, step, outputs)

    def _finish(self, step: EnteredStep, outputs: Callable[[], Hidden]) -> StepResult:
        return self._sample(step, outputs(), None)()
