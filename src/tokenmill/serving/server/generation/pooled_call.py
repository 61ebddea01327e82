"""Turn calls for vectors and scores, of any API, into messages to the text workers: one for all texts of a call."""

from __future__ import annotations

import array
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from tokenmill.core.errors import Unavailable
from tokenmill.core.messages import GenerateText, TextOutput
from tokenmill.core.pooling import PooledTexts, PoolingParams
from tokenmill.serving.frontend.pooled_texts import POOLED
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, deadline_of
from tokenmill.serving.server.generation.writer import PING, UsageCounter

Truncation = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


class PooledCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of any API; None stands for a field that its body does not have.

    Attributes:
        texts: in groups that have each a prefix of their own.
        pooling: of all of them.
    """

    texts: Sequence[PooledTexts]
    pooling: PoolingParams
    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None

    def messages(self, context: ServerContext) -> tuple[GenerationCall, list[GenerateText]]:
        """Return the call as replies take it, and the messages that ask a text worker for it."""
        message = GenerateText(
            ids=[],
            params=POOLED,
            priority=context.check_priority(self.priority),
            cache_salt=self.cache_salt or "",
            needs_no_output=True,
            pooling=self.pooling,
            adapter=context.adapters.find(self.model),
            deadline=deadline_of(self.timeout),
        )
        call = GenerationCall(params={}, priority=self.priority, timeout=self.timeout, model=self.model)
        return call, [msgspec.structs.replace(message, texts=group) for group in self.texts]


class UnstreamedWriter:
    """The part of a `ReplyWriter` for vectors and scores that is the same in all forms: they are never streamed."""

    ping = PING

    def answers(self, outputs: Mapping[int, TextOutput]) -> list[bytes]:
        """Return the vectors or scores, float32 and little-endian, in the order of the call's texts.

        Raises:
            Unavailable: a text has no answer, because an operator has aborted its request.
        """
        answers = [outputs[index].embedding for index in sorted(outputs)]
        given = [answer for answer in answers if answer is not None]
        if len(given) < len(answers):
            raise Unavailable("the request was aborted; send it again")
        return given

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return b"": the reply is never streamed."""
        return b""

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return b"": the reply is never streamed."""
        return b""

    def failure(self, error: Exception) -> bytes:
        """Return b"": the reply is never streamed."""
        return b""


class PooledWriter(UnstreamedWriter):
    """Writes vectors and scores in one document.

    Args:
        write: makes it of the answers and of the number of the call's tokens.
    """

    def __init__(self, write: Callable[[list[bytes], int], object]) -> None:
        self._write = write

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the reply as JSON.

        Raises:
            Unavailable: see `answers`.
        """
        return msgspec.json.encode(self._write(self.answers(outputs), usage.usage().prompt_tokens))


class PooledUsage(msgspec.Struct):
    """The number of tokens in the texts of a call."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, num_tokens: int) -> PooledUsage:
        """Return the usage of a call of so many tokens, none of which is generated."""
        return cls(num_tokens, num_tokens)


def numbers(answer: bytes) -> list[float]:
    """Return the numbers of a vector or of scores (float32, little-endian)."""
    return array.array("f", answer).tolist()
