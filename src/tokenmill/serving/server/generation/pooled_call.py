"""Turn calls for vectors and scores, of any API, into messages to the text workers: one for all texts of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from tokenmill.core.messages import GenerateText
from tokenmill.core.pooling import PooledTexts, PoolingParams
from tokenmill.serving.frontend.pooled_texts import POOLED
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall

Truncation = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledCall:
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
        )
        call = GenerationCall(params={}, priority=self.priority, timeout=self.timeout, model=self.model)
        return call, [msgspec.structs.replace(message, texts=group) for group in self.texts]
