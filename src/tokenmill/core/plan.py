"""`StepPlan`, `StepResult` and `StepOutcome`: everything that passes between the scheduler and a runner.

A plan holds differences only: a request is sent in full when it takes a row (`AdmittedRequest`), after that a step
names its row and how far it goes. Both are plain data (numpy arrays and structs), so a plan can be recorded, replayed
and sent to other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.media import MediaSpan
from tokenmill.core.pooling import PoolingParams
from tokenmill.core.request import Proposal, TokenArray
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.transfers import PlanTransfers

IntArray = npt.NDArray[np.int32]


class AdmittedRequest(msgspec.Struct, frozen=True):
    """A request that takes a row in this step: admitted, or resumed after a preemption.

    Attributes:
        token_ids: prompt and committed output, [num_tokens] int32, the runner copies it into the token table.
        num_prompt_tokens: where the output begins (penalties tell prompt from output).
        stop_token_ids: ids to mask while fewer than `params.min_tokens` tokens are out.
        seed: the seed its draws are keyed by; never None here.
        pooling: a vector or scores are wanted for its prompt.
        media: the images of its prompt.
        adapter: digest of its adapter; "": none. adapter_slot: the slot for that adapter, from 0.
        state_slot: the slot of its recurrent state, if the model has recurrent states.
    """

    row: int
    request_id: str
    token_ids: TokenArray
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...]
    seed: int
    pooling: PoolingParams | None = None
    adapter: str = ""
    adapter_slot: int = 0
    media: tuple[MediaSpan, ...] = ()
    state_slot: int = 0


class PlanStates(msgspec.Struct, frozen=True):
    """Copies of recurrent states before and after a step; all [N] or [M] int32.

    Attributes:
        load_slots, load_sources: before the step a slot becomes a copy of another; source -1: the state of no tokens.
        save_rows, save_ends, save_slots: the state behind a row's first `end` tokens, of which the step runs the last
            one, is copied to a slot; at most one for each row.
    """

    load_slots: IntArray
    load_sources: IntArray
    save_rows: IntArray
    save_ends: IntArray
    save_slots: IntArray


class PageEntries(msgspec.Struct, frozen=True):
    """New entries of a page table, `page_table[rows[i], numbers[i]] = ids[i]`; [P] int32 each."""

    rows: IntArray
    numbers: IntArray
    ids: IntArray


class StepPlan(msgspec.Struct, frozen=True):
    """One pass of the model. B scheduled requests, in batch order.

    Attributes:
        step: its number; the only clock of scheduler and cache.
        new_rows: requests that take a row; applied before anything else.
        request_ids: [B], for logs and replay; the runner only needs rows.
        rows: [B] int32.
        num_computed: [B] int32, tokens already computed: the first position this step runs.
        num_scheduled: [B] int32 >= 1, tokens this step runs.
        num_samples: [B] int32, tokens that the step may bring the request: 0 until it reaches the last known token,
            then 1, and one more for each draft token behind it. `num_scheduled` counts drafts.
        page_rows, page_numbers, page_ids: [P] int32 each: new entries of the page table,
            `page_table[page_rows[i], page_numbers[i]] = page_ids[i]`.
        draft_ids: [D] int32, the draft tokens of all requests in batch order, `num_samples - 1` of each that samples;
            None: absent.
        forget, encode: digests of images whose outputs are dropped, and then of those to encode before the step.
        load: digests of those whose outputs are loaded instead: they were encoded elsewhere.
        window_pages: new entries of the page table of layers with a window, if they have a table of their own. Entries
            of pages behind a window stay in it: they are never read again.
        states: recurrent states to load and keep; None: none.
        page_copies: [2, C] int32, pages and those that become copies of them before the step, in this order; with a
            window group [4, C], the same of that group. None: absent.
        transfers: pages to load and save beside the step, which may then have no requests; None: none.
    """

    step: int
    new_rows: tuple[AdmittedRequest, ...]
    request_ids: tuple[str, ...]
    rows: IntArray
    num_computed: IntArray
    num_scheduled: IntArray
    num_samples: IntArray
    page_rows: IntArray
    page_numbers: IntArray
    page_ids: IntArray
    draft_ids: IntArray | None = None
    transfers: PlanTransfers | None = None
    encode: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()
    window_pages: PageEntries | None = None
    states: PlanStates | None = None
    load: tuple[str, ...] = ()
    page_copies: IntArray | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step runs."""
        return int(self.num_scheduled.sum())


class Logprob(msgspec.Struct, array_like=True):
    """Log probability of one token and its rank (1 = most likely)."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(msgspec.Struct, array_like=True):
    """The sampled token's log probability, and the most likely tokens at its position, best first."""

    sampled: Logprob
    top: list[Logprob]


class RowFailure(msgspec.Struct, frozen=True):
    """The reason why a request cannot go on. A `status` below 500 says that the request itself is at fault."""

    error: str
    status: int = 500


class StepResult(msgspec.Struct, frozen=True):
    """The outcome of a step. Request i of the batch gets `token_ids[token_starts[i] : token_starts[i + 1]]`.

    Attributes:
        token_ids: [T] int32, the tokens that the step brings, request after request. At most `num_samples` each: drafts
            as long as the model agrees with them, and one token more. No tokens for a request that is sampled again
            (the mask of its grammar was late) or has failed.
        token_starts: [B + 1] int32.
        logprobs: batch index -> log probabilities of its tokens, for the requests that asked.
        failures: batch index -> the reason why that request cannot go on.
        prompt_logprobs: batch index -> those of the prompt's tokens from position `num_computed + 1` on.
        embeddings: batch index -> the vector of its prompt, float32, little-endian.
        proposals: batch index -> tokens that may follow those that it gets.
    """

    step: int
    token_ids: IntArray
    token_starts: IntArray
    logprobs: dict[int, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    failures: dict[int, RowFailure] = msgspec.field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = msgspec.field(default_factory=dict)
    embeddings: dict[int, bytes] = msgspec.field(default_factory=dict)
    proposals: dict[int, Proposal] = msgspec.field(default_factory=dict)

    @classmethod
    def empty(cls, step: int) -> Self:
        """Return the outcome of a step without requests."""
        return cls(step, np.zeros(0, np.int32), np.zeros(1, np.int32))


class StepOutcome:
    """The outcome of a launched step, which may still be running.

    Args:
        finish: waits for the outcome and returns it, or raises the step's error. Called only once, on first use.

    Attributes:
        error: the step's error, if it is known already.
    """

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        self.error: Exception | None = None
        self._finish: Callable[[], StepResult] | None = finish
        self._result: StepResult | None = None

    @classmethod
    def failed(cls, error: Exception) -> Self:
        """Return the outcome of a step that could not be started."""

        def fail() -> StepResult:
            raise error

        outcome = cls(fail)
        outcome.wait()
        return outcome

    def wait(self) -> None:
        """Wait until the step has ended, successfully or not."""
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                self._result = finish()
            except Exception as error:
                self.error = error

    def result(self) -> StepResult:
        """Wait for the outcome and return it. Raises the step's error."""
        self.wait()
        if self.error is not None:
            raise self.error
        assert self._result is not None, "a step that has ended well has a result"
        return self._result
