"""From what a step sampled to its `StepResult`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.runner.prompt_reports import Reports
from tokenmill.sampling.logprobs import LogprobTensors, to_messages
from tokenmill.scheduler.plan import StepPlan, StepResult


def sampling_rows(plan: StepPlan) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The rows that sample in a step, and the index in its sequence of the token that each samples: [S] int64 each."""
    positions = (plan.num_computed + plan.num_scheduled)[plan.samples]
    return plan.rows[plan.samples].astype(np.int64), positions.astype(np.int64)


def result_of(
    plan: StepPlan,
    reports: Reports,
    sampled: npt.NDArray[np.int32] | None = None,
    logprobs: LogprobTensors | None = None,
    failures: Mapping[int, str] | None = None,
) -> StepResult:
    """The outcome of a step.

    Args:
        sampled: [S] int32, the tokens of the rows that sample; None: none do.
        logprobs: of those that asked.
        failures: why a row cannot go on, by its index among those that sample.
    """
    token_ids = np.full(len(plan.rows), -1, dtype=np.int32)
    indices = np.flatnonzero(plan.samples)
    if sampled is not None:
        token_ids[indices] = sampled
    return StepResult(
        plan.step,
        token_ids,
        {} if logprobs is None else to_messages(logprobs, indices.tolist()),
        {int(indices[index]): why for index, why in (failures or {}).items()},
        reports.logprobs,
        reports.embeddings,
    )
