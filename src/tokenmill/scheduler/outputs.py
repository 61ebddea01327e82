"""What the outputs of a step say besides its tokens."""

from __future__ import annotations

from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import StepResult, TokenLogprobs
from tokenmill.core.request import Request


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
