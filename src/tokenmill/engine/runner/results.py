"""Turn a step's samples into its `StepResult`."""

from __future__ import annotations

import numpy as np

from tokenmill.core.plan import IntArray, RowFailure, StepPlan, StepResult, TokenLogprobs
from tokenmill.core.request import Proposal
from tokenmill.engine.runner.prompt_reports import Reports
from tokenmill.engine.runner.samples import Samples
from tokenmill.engine.runner.step_sampler import Sampled
from tokenmill.model.sampling.draws import NO_TOKEN
from tokenmill.model.sampling.logprobs import to_messages
from tokenmill.model.sampling.sampler import NOTHING_LEFT

_FAILURES = {
    NO_TOKEN: RowFailure("the model's logits for this request are NaN or infinite"),
    NOTHING_LEFT: RowFailure(
        "no token is left for this request: its grammar, allowed_token_ids, bad_words, min_tokens and penalties "
        "together rule out all that the model could say",
        status=400,
    ),
}


def result_of(plan: StepPlan, samples: Samples, reports: Reports, sampled: Sampled | None) -> StepResult:
    """Make the outcome of a step.

    Args:
        reports: on the host. sampled: on the host; None: the step samples nothing.
    """
    token_ids = np.empty(0, dtype=np.int32) if sampled is None else sampled.token_ids.astype(np.int32)
    of_prompts, without_numbers = reports.told_logprobs()
    failures = {**_failures_of(token_ids, samples, sampled), **without_numbers, **reports.failures}
    brings = samples.are_due(token_ids) & (token_ids >= 0)
    if failures:
        brings &= ~np.isin(samples.indices, list(failures))
    starts = np.zeros(len(plan.rows) + 1, dtype=np.int32)
    np.cumsum(np.bincount(samples.indices[brings], minlength=len(plan.rows)), out=starts[1:])
    logprobs: dict[int, list[TokenLogprobs]] = {}
    if sampled is not None and sampled.logprobs is not None:
        is_brought, owners = brings.tolist(), samples.indices.tolist()
        for number, told in to_messages(sampled.logprobs).items():
            if is_brought[number]:
                logprobs.setdefault(owners[number], []).append(told)
    return StepResult(
        plan.step,
        token_ids[brings],
        starts,
        logprobs,
        failures,
        of_prompts,
        reports.embeddings,
        _proposals_of(samples, sampled),
    )


def _failures_of(token_ids: IntArray, samples: Samples, sampled: Sampled | None) -> dict[int, RowFailure]:
    """Let grammars take what was sampled; return why requests cannot go on, by batch index.

    Args:
        token_ids: [S]; set to -1 where a row gets no token because the mask of its grammar was late.
    """
    missing = np.flatnonzero(token_ids < 0).tolist()
    # Behind a draft it may not be due; if it is, the next step comes upon it again.
    broken = {number: _FAILURES[int(token_ids[number])] for number in missing if samples.is_first(number)}
    masks = None if sampled is None else sampled.masks
    grammars = {} if masks is None else masks.take_samples(token_ids)
    failures = {**{number: RowFailure(why, status=400) for number, why in grammars.items()}, **broken}
    return {int(samples.indices[number]): why for number, why in failures.items()}


def _proposals_of(samples: Samples, sampled: Sampled | None) -> dict[int, Proposal]:
    """Return the tokens that grammars force after what was sampled, by batch index."""
    if sampled is None or sampled.masks is None:
        return {}
    forced = sampled.masks.proposals.items()
    return {int(samples.indices[number]): Proposal(np.array(ids, dtype=np.int32), True) for number, ids in forced}
