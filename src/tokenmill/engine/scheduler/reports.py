"""Report what a step brings besides tokens, and why requests wait."""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import StepResult, TokenLogprobs
from tokenmill.core.request import Request, RequestStatus
from tokenmill.engine.scheduler.queues import RequestQueue

# What a request's status does not say is the same prompt.
WAIT_REASON_OF = {
    RequestStatus.WAITING_FOR_GRAMMAR: "grammar",
    RequestStatus.WAITING_FOR_ADAPTER: "adapter",
    RequestStatus.WAITING_FOR_REMOTE_KV: "remote_kv",
    RequestStatus.WAITING_FOR_ENCODER: "encoder",
}
WAIT_REASONS = ("capacity", "same_prompt", "grammar")


def add_extras(output: TokenOutput, index: int, result: StepResult) -> None:
    """Add a step's log probabilities or embedding of a request to its output."""
    if index in result.logprobs:
        output.logprobs = result.logprobs[index][: len(output.token_ids)]
    if index in result.embeddings:
        output.embedding, output.token_ids = result.embeddings[index], []


def prompt_report(request: Request, num_computed: int, logprobs: list[TokenLogprobs]) -> TokenOutput:
    """Report log probabilities of prompt tokens from `num_computed + 1` on, without those told before a preemption."""
    known = request.num_reported_tokens - num_computed
    request.num_reported_tokens = max(request.num_reported_tokens, num_computed + len(logprobs))
    return TokenOutput(request.id, [], prompt_logprobs=logprobs[max(0, known) :])


def count_reasons(waiting: Iterable[Request]) -> dict[str, int]:
    """Count waiting requests by reason.

    `capacity`: rows, pages or budget; `same_prompt`: another request that computes what they would. Rare reasons
    appear only while a request waits for them.
    """
    counts = dict.fromkeys(WAIT_REASONS, 0)
    for request in waiting:
        reason = WAIT_REASON_OF.get(request.status, "capacity")
        reason = reason if request.awaited_page is None else "same_prompt"
        counts[reason] = counts.get(reason, 0) + 1
    return counts


def wait_reason(request: Request, waiting: RequestQueue) -> str:
    """Return why a request was not scheduled in the last step; see `Scheduler.explain`."""
    if request.is_running:
        return request.wait_reason
    if request.is_paused:
        return "waiting for the next input of its session"
    ahead = waiting.position(request)
    if request.wait_reason or not ahead:
        return request.wait_reason or "has just arrived"
    return f"{ahead} ahead of it; the first: {waiting[0].wait_reason or 'has just arrived'}"
