"""`StepPlan` and `StepResult`: all that passes between the scheduler and a runner.

A plan holds differences only: a request is sent in full when it takes a row (`NewRow`), after that a step names its
row and how far it goes. Both are plain data (numpy arrays and structs), so a plan can be recorded, replayed and sent
to other ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tokenmill.messages import TokenLogprobs
from tokenmill.request import TokenArray
from tokenmill.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that takes a row in this step: admitted, or resumed after a preemption.

    Attributes:
        token_ids: prompt and committed output, [num_tokens] int32, the runner copies it into the token table.
        num_prompt_tokens: where the output begins (penalties tell prompt from output).
        stop_token_ids: ids to mask while fewer than `params.min_tokens` tokens are out.
        seed: the seed its draws are keyed by; never None here.
        pooling: "mean" or "last": a vector is wanted for its prompt; "": none.
    """

    row: int
    request_id: str
    token_ids: TokenArray
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    seed: int
    pooling: str = ""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One pass of the model. B scheduled requests, in batch order.

    Attributes:
        step: its number; the only clock of scheduler and cache.
        new_rows: requests that take a row; applied before anything else.
        request_ids: [B], for logs and replay; the runner only needs rows.
        rows: [B] int32.
        num_computed: [B] int32, tokens already computed: the first position this step runs.
        num_scheduled: [B] int32 >= 1, tokens this step runs.
        samples: [B] bool, True where the step reaches the request's last known token and so samples the next.
        page_rows, page_numbers, page_ids: [P] int32 each: new entries of the page table,
            `page_table[page_rows[i], page_numbers[i]] = page_ids[i]`.
    """

    step: int
    new_rows: tuple[NewRow, ...]
    request_ids: tuple[str, ...]
    rows: IntArray
    num_computed: IntArray
    num_scheduled: IntArray
    samples: BoolArray
    page_rows: IntArray
    page_numbers: IntArray
    page_ids: IntArray

    @property
    def num_tokens(self) -> int:
        """Tokens the step runs."""
        return int(self.num_scheduled.sum())


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step.

    Attributes:
        token_ids: [B] int32, the sampled token of each scheduled request; -1 where `samples` is False, and where a
            request goes without: the mask of its grammar was late, or it has failed.
        logprobs: batch index -> its log probabilities, for the requests that asked.
        failures: batch index -> why that request cannot go on.
        prompt_logprobs: batch index -> those of the prompt's tokens from position `num_computed + 1` on.
        embeddings: batch index -> the vector of its prompt, float32, little-endian.
    """

    step: int
    token_ids: IntArray
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    embeddings: dict[int, bytes] = field(default_factory=dict)
