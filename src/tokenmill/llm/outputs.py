"""What `LLM` gives back for a prompt, and how it is put together from the deltas of its requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.core.messages import TextOutput
from tokenmill.core.plan import TokenLogprobs
from tokenmill.core.request import FinishReason


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: 0 to n - 1.
        stop_reason: the stop string or token id that ended it, where one did that is not the model's own EOS.
        logprobs: one entry per token, if they were asked for.
        error: why it failed; `finish_reason` is `error` then.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None

    def add(self, delta: TextOutput) -> None:
        """Append what a step brought."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.error = delta.error
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its n continuations.

    Attributes:
        request_ids: the engine's ids of the continuations.
        num_cached_tokens: prompt tokens that the prefix cache supplied (to the first continuation).
        prompt_logprobs: one entry per token of the prompt but the first, if they were asked for.
    """

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    request_ids: list[str] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None

    def add(self, index: int, delta: TextOutput) -> None:
        """Append what a step brought one of the continuations."""
        self.outputs[index].add(delta)
        if index == 0:
            self.num_cached_tokens = delta.num_cached_tokens
            if delta.prompt is not None:
                self.prompt_logprobs = delta.prompt.logprobs

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all continuations."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def is_finished(self) -> bool:
        """True once every continuation has ended."""
        return all(output.finish_reason is not None for output in self.outputs)
