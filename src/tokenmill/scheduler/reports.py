"""What the scheduler tells besides tokens: extras of a step's outputs, and what waiting requests wait for."""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import StepResult, TokenLogprobs
from tokenmill.core.request import Request, RequestStatus

# What a request's status does not say is the same prompt.
WAIT_REASON_OF = {
    RequestStatus.WAITING_FOR_GRAMMAR: "grammar",
    RequestStatus.WAITING_FOR_ADAPTER: "adapter",
    RequestStatus.WAITING_FOR_REMOTE_KV: "remote_kv",
}
WAIT_REASONS = ("capacity", "same_prompt", "grammar")


def add_extras(output: TokenOutput, index: int, result: StepResult) -> None:
    """What a step says of a request besides its tokens."""
    if index in result.logprobs:
        output.logprobs = result.logprobs[index][: len(output.token_ids)]
    if index in result.embeddings:
        output.embedding, output.token_ids = result.embeddings[index], []


def prompt_report(request: Request, num_computed: int, logprobs: list[TokenLogprobs]) -> TokenOutput:
    """Log probabilities of the prompt's tokens from `num_computed + 1` on, less those told before a preemption."""
    known = request.num_reported_tokens - num_computed
    request.num_reported_tokens = max(request.num_reported_tokens, num_computed + len(logprobs))
    return TokenOutput(request.id, [], prompt_logprobs=logprobs[max(0, known) :])


def count_reasons(waiting: Iterable[Request]) -> dict[str, int]:
    """How many requests wait, by what for; see `Scheduler.waiting_by_reason`."""
    counts = dict.fromkeys(WAIT_REASONS, 0)
    for request in waiting:
        reason = WAIT_REASON_OF.get(request.status, "capacity")
        reason = reason if request.awaited_page is None else "same_prompt"
        counts[reason] = counts.get(reason, 0) + 1
    return counts
