"""How /v1/completions spells its choices."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from tokenmill.messages import TextOutput
from tokenmill.server.reply_format import finish_reason_text, finite, positions, spell

TEXT = "text_completion"


class TextLogprobs(msgspec.Struct):
    """`logprobs` of a choice: parallel lists over its tokens."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct, kw_only=True):
    """A choice, of a document or a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class TextFormat:
    """Spells the choices of one call."""

    def __init__(self, return_token_ids: bool = False) -> None:
        self._return_token_ids = return_token_ids
        self._offsets: dict[int, int] = {}

    def chunk_choices(self, index: int, output: TextOutput) -> list[TextChoice]:
        """See `ReplyFormat`."""
        if output.text or output.logprobs or output.finish_reason is not None or self._return_token_ids:
            return [self.choice(index, output)]
        return []

    def choice(self, index: int, output: TextOutput) -> TextChoice:
        """See `ReplyFormat`."""
        return TextChoice(
            index=index,
            text=output.text,
            logprobs=self._logprobs(index, output),
            finish_reason=finish_reason_text(output.finish_reason),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._return_token_ids else UNSET,
        )

    def _logprobs(self, index: int, output: TextOutput) -> TextLogprobs | None:
        if output.logprobs is None:
            return None
        logprobs = TextLogprobs([], [], [], [])
        offset = self._offsets.get(index, 0)
        for position in positions(output):
            token = spell(output, position.sampled.token_id).decode("utf-8", "replace")
            logprobs.tokens.append(token)
            logprobs.token_logprobs.append(finite(position.sampled.logprob))
            entries = [*position.top, position.sampled]
            logprobs.top_logprobs.append(
                {spell(output, e.token_id).decode("utf-8", "replace"): finite(e.logprob) for e in entries}
            )
            logprobs.text_offset.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return logprobs
