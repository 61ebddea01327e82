"""Report what a step brings besides tokens, and why requests wait."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import StepResult, TokenLogprobs
from tokenmill.core.request import Request, RequestStatus
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.scheduler.queue import RequestQueue

# What a request's status does not say is the same prompt.
WAIT_REASON_OF = {
    RequestStatus.WAITING_FOR_GRAMMAR: "grammar",
    RequestStatus.WAITING_FOR_ADAPTER: "adapter",
    RequestStatus.WAITING_FOR_REMOTE_KV: "remote_kv",
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
    """Count waiting requests by reason; see `Scheduler.waiting_by_reason`."""
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
        return "waits for the next input of its session"
    ahead = waiting.position(request)
    if request.wait_reason or not ahead:
        return request.wait_reason or "has just arrived"
    return f"{ahead} ahead of it; the first {waiting[0].wait_reason or 'has just arrived'}"


def pages_text(count: int, more: str = "") -> str:
    """Return a number of pages in words."""
    return f"{count} {more}page{'' if count == 1 else 's'}"


def short_of(kv: KVManager, num_missing: int, num_pages: int, spare: int, more: str = "") -> str:
    """Return why a request waits that lacks `num_missing` pages.

    Args:
        num_pages: all pages that it would have. spare: pages that must stay available for others.
    """
    num_available, windows = kv.num_available, kv.windows
    if windows is not None and num_missing + spare <= num_available:
        needed, left = windows.num_wanted(num_pages), windows.num_left
        return f"needs {needed} window pages, {left} of {windows.pool.num_usable} are promised to nobody"
    needed_text = pages_text(num_missing, more)
    return f"needs {needed_text}, {num_available} {'is' if num_available == 1 else 'are'} free or evictable"


@dataclass(frozen=True, slots=True)
class Shortage:
    """Pages of each group that a running request lacks; a number not above 0 means no lack."""

    pages: int
    windows: int

    @classmethod
    def of(cls, kv: KVManager, request: Request, end: int, spare: int) -> Self:
        """Return the pages that a request lacks to hold `end` tokens, with `spare` pages left to others."""
        pages = kv.num_missing_pages(request, end) + spare - kv.num_available
        return cls(pages, kv.num_missing_windows(request, end, spare))

    def __str__(self) -> str:
        """Return the shortage in words."""
        return pages_text(self.pages) if self.pages > 0 else pages_text(self.windows, "window ")
