"""Collect the report that a client wants of its prompt until the first output can carry it."""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.core.messages import PromptReport, TokenOutput
from tokenmill.core.plan import TokenLogprobs
from tokenmill.serving.frontend.tokenizer import Tokenizer


class PromptReporter:
    """The prompt of one request: text, ids, and the log probabilities that the engine sends in chunks."""

    def __init__(self, text: str, token_ids: list[int], has_logprobs: bool) -> None:
        self._report: PromptReport | None = PromptReport(text, token_ids, [] if has_logprobs else None)

    def begin_again(self) -> None:
        """Drop collected log probabilities: another engine takes over the request and sends them again."""
        if self._report is not None and self._report.logprobs is not None:
            self._report.logprobs = []

    def add_output(self, output: TokenOutput) -> PromptReport | None:
        """Take in an output; return the report with the first one that the client sees."""
        report = self._report
        if report is not None and report.logprobs is not None and output.prompt_logprobs:
            report.logprobs += output.prompt_logprobs
        if not (output.token_ids or output.finish_reason):
            return None
        self._report = None
        return report


def spellings(
    tokenizer: Tokenizer, logprobs: Iterable[TokenLogprobs], prompt: PromptReport | None
) -> dict[int, bytes] | None:
    """Return the bytes of every token that the client gets with its log probability, or None without any."""
    named = list(logprobs)
    reported: set[int] = set()
    if prompt is not None and prompt.logprobs is not None:
        named += prompt.logprobs
        reported.update(prompt.token_ids)
    reported.update(entry.token_id for position in named for entry in (position.sampled, *position.top))
    return {token_id: tokenizer.token_bytes(token_id) for token_id in reported} or None
