"""The fields that the bodies of retrieval share, and the call that they amount to."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenmill.core.pooling import Cut, PooledTexts, PoolingParams
from tokenmill.serving.frontend.pooled_texts import truncation
from tokenmill.serving.server.generation.fields import Int32, Label
from tokenmill.serving.server.generation.pooled_call import PooledCall, Seconds, Truncation
from tokenmill.serving.server.http.request_id import RequestId


class RetrievalFields(msgspec.Struct, kw_only=True):
    """Fields that every body may have.

    Attributes:
        truncate_prompt_tokens: cut longer texts, or pairs, to as many tokens; -1: to what the model takes.
        truncate: true: cut them to that; false: refuse them. truncation_direction: the side that is lost.
    """

    model: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    truncate: bool | None = None
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None
    user: str | None = None
    priority: Int32 | None = None
    cache_salt: Label | None = None
    request_id: RequestId | None = None
    timeout: Seconds | None = None

    @property
    def cut(self) -> tuple[Cut | None, int | None]:
        """The side on which texts are cut, None: as the server cuts; and the most tokens of each.

        Raises:
            InvalidRequest: `truncate_prompt_tokens` is 0.
        """
        side = (self.truncation_side or self.truncation_direction or "right").lower()
        cut, limit = truncation(self.truncate_prompt_tokens, side)
        if cut is None and self.truncate is not None:
            cut = Cut(side) if self.truncate else Cut.OFF
        return cut, limit

    def pooled_call(self, texts: list[PooledTexts], pooling: PoolingParams) -> PooledCall:
        """Return the call for these texts."""
        return PooledCall(
            texts=texts,
            pooling=pooling,
            model=self.model,
            priority=self.priority,
            cache_salt=self.cache_salt,
            timeout=self.timeout,
        )
