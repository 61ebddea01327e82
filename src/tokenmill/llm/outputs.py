"""Define the results of `LLM` in vLLM's shapes, and build them up from the deltas of requests."""

from __future__ import annotations

import array
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from tokenmill.core.errors import TokenMillError
from tokenmill.core.messages import TextOutput
from tokenmill.core.plan import TokenLogprobs
from tokenmill.core.request import FinishReason


class Logprob(msgspec.Struct, frozen=True):
    """The log probability of a token at its position; `rank` 1 is the likeliest, `decoded_token` its text alone."""

    logprob: float
    rank: int
    decoded_token: str


# One position: the token that is there first, then the most likely ones, best first.
LogprobsAt = dict[int, Logprob]


@dataclass(slots=True)
class RequestMetrics:
    """Times of a prompt in seconds: `arrival_time` since 1970, the others of `time.monotonic()`.

    Attributes:
        scheduled_ts: time of the first step that it was part of; known once it is finished.
        first_token_ts, last_token_ts: over all continuations; 0: no token yet.
        num_generation_tokens: over all continuations.
    """

    arrival_time: float = field(default_factory=time.time)
    queued_ts: float = field(default_factory=time.monotonic)
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0

    @property
    def first_token_latency(self) -> float:
        """Seconds from the prompt's arrival to its first token."""
        return self.first_token_ts - self.queued_ts

    def add(self, delta: TextOutput) -> None:
        """Count the tokens of a delta and note when they came."""
        if delta.token_ids:
            self.last_token_ts = time.monotonic()
            self.first_token_ts = self.first_token_ts or self.last_token_ts
            self.num_generation_tokens += len(delta.token_ids)
        self.scheduled_ts = self.scheduled_ts or delta.scheduled_at


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: 0 to n - 1.
        cumulative_logprob: the sum over its tokens, if log probabilities were asked for.
        logprobs: one entry per token, if log probabilities were asked for.
        stop_reason: the stop string or token id that ended it, unless that is the model's own EOS.
        error: why it failed; `finish_reason` is `error` then.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAt] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def add(self, delta: TextOutput) -> None:
        """Append the tokens and text of a delta."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.error = delta.error
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += _named(delta.logprobs, delta.token_bytes or {})
            brought = sum(one.sampled.logprob for one in delta.logprobs)
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + brought

    def copy(self) -> CompletionOutput:
        """Return a copy that does not grow with this one."""
        logprobs = None if self.logprobs is None else [*self.logprobs]
        return dataclasses.replace(self, token_ids=[*self.token_ids], logprobs=logprobs)


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """A vector."""

    embedding: list[float]


class ScoringOutput(msgspec.Struct, frozen=True):
    """The score of a text, or the log-likelihood (natural logarithm) of a prompt, given its first token."""

    score: float


class ClassificationOutput(msgspec.Struct, frozen=True):
    """The probabilities of all labels; `label`: the likeliest."""

    probs: list[float]
    label: str

    @classmethod
    def of(cls, probs: list[float], labels: Sequence[str]) -> ClassificationOutput:
        """Return the output for probabilities in the order of the labels."""
        return cls(probs, labels[max(range(len(probs)), key=probs.__getitem__)] if probs else "")

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)


class RerankOutput(msgspec.Struct, frozen=True):
    """A document, its place among those given, and how well it answers the query."""

    index: int
    relevance_score: float
    document: str


What = TypeVar("What")


class PoolingRequestOutput(msgspec.Struct, Generic[What], frozen=True):
    """The result of a prompt that is not continued."""

    request_id: str
    outputs: What
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its n continuations.

    Attributes:
        request_id: the engine's id of the first continuation.
        prompt: its text, for a conversation as the chat template renders it; None if token ids were given.
        prompt_logprobs: one entry per token of the prompt, None for the first, if they were asked for.
        num_cached_tokens: prompt tokens that the prefix cache supplied (to the first continuation).
        request_ids: the engine's ids of all continuations.
        embedding: a vector for the prompt, float32, little-endian, if one was asked for.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    request_ids: list[str]
    prompt: str | None = None
    prompt_logprobs: list[LogprobsAt | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    embedding: bytes | None = None

    def add(self, index: int, delta: TextOutput) -> None:
        """Add a delta to one of the continuations."""
        self.outputs[index].add(delta)
        self.metrics.add(delta)
        if index == 0:
            self.num_cached_tokens = delta.num_cached_tokens
            self.embedding = delta.embedding or self.embedding
            if delta.prompt is not None and delta.prompt.logprobs is not None:
                self.prompt_logprobs = [None, *_named(delta.prompt.logprobs, delta.token_bytes or {})]

    def copy(self) -> RequestOutput:
        """Return a copy that does not grow with this one."""
        outputs = [output.copy() for output in self.outputs]
        return dataclasses.replace(self, outputs=outputs, metrics=dataclasses.replace(self.metrics))

    def vector(self) -> EmbeddingOutput:
        """Return the vector that was asked for."""
        return EmbeddingOutput(array.array("f", self.embedding or b"").tolist())

    def log_likelihood(self) -> ScoringOutput:
        """Return the log-likelihood of the prompt, whose log probabilities were asked for."""
        tokens = zip(self.prompt_token_ids, self.prompt_logprobs or (), strict=False)
        return ScoringOutput(sum((at[token_id].logprob for token_id, at in tokens if at is not None), 0.0))

    def answered(self, what: What) -> PoolingRequestOutput[What]:
        """Return `what` as the result of the prompt; raise TokenMillError if it failed."""
        self.check()
        return PoolingRequestOutput(self.request_id, what, self.prompt_token_ids, self.num_cached_tokens)

    def check(self) -> None:
        """Raise TokenMillError if a continuation failed."""
        for error in (output.error for output in self.outputs if output.finish_reason is FinishReason.ERROR):
            raise TokenMillError(error or "the request failed")

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens of all continuations."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def finished(self) -> bool:
        """True once every continuation has ended."""
        return all(output.finish_reason is not None for output in self.outputs)


def _named(positions: Iterable[TokenLogprobs], spelled: Mapping[int, bytes]) -> list[LogprobsAt]:
    """Return log probabilities by token id, with the tokens' texts."""
    texts = {token_id: token.decode("utf-8", "replace") for token_id, token in spelled.items()}
    return [
        {one.token_id: Logprob(one.logprob, one.rank, texts.get(one.token_id, "")) for one in (at.sampled, *at.top)}
        for at in positions
    ]
