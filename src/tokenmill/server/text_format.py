"""How /v1/completions spells its choices."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from tokenmill.messages import TextOutput, TokenLogprobs
from tokenmill.server.prompt_format import PromptFields, PromptShown
from tokenmill.server.reply_format import finish_reason_text, finite, positions, spell

TEXT = "text_completion"


class TextLogprobs(msgspec.Struct):
    """`logprobs` of a choice: parallel lists over its tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(PromptFields, kw_only=True):
    """A choice, of a document or a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class TextFormat:
    """Spells the choices of one call."""

    def __init__(self, shown: PromptShown, echo: bool = False) -> None:
        """`echo`: the prompt stands before the text, and its log probabilities before those of the text."""
        self._echo = echo
        self._shown = shown
        self._offsets: dict[int, int] = {}

    def chunk_choices(self, index: int, output: TextOutput) -> list[TextChoice]:
        """See `ReplyFormat`."""
        if output.text or output.logprobs or output.prompt or output.finish_reason is not None or self._shown.token_ids:
            return [self.choice(index, output)]
        return []

    def choice(self, index: int, output: TextOutput) -> TextChoice:
        """See `ReplyFormat`."""
        echoed = output.prompt.text if self._echo and output.prompt is not None else ""
        prompt = self._shown.fields(output)
        return TextChoice(
            index=index,
            text=echoed + output.text,
            logprobs=self._logprobs(index, output),
            finish_reason=finish_reason_text(output.finish_reason),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._shown.token_ids else UNSET,
            prompt_logprobs=prompt.prompt_logprobs,
            prompt_token_ids=prompt.prompt_token_ids,
        )

    def _logprobs(self, index: int, output: TextOutput) -> TextLogprobs | None:
        if output.logprobs is None:
            return None
        logprobs = TextLogprobs([], [], [], [])
        offset = self._offsets.get(index, 0)
        for token, position in self._told(output):
            logprobs.tokens.append(token)
            logprobs.token_logprobs.append(None if position is None else finite(position.sampled.logprob))
            logprobs.top_logprobs.append(None if position is None else _top(output, position))
            logprobs.text_offset.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return logprobs

    def _told(self, output: TextOutput) -> Iterator[tuple[str, TokenLogprobs | None]]:
        """Tokens with their log probabilities, the echoed prompt's before the output's; of its first one none."""
        if self._echo and output.prompt is not None:
            yield _spelled(output, output.prompt.token_ids[0]), None
            for position in output.prompt.logprobs or ():
                yield _spelled(output, position.sampled.token_id), position
        for position in positions(output):
            yield _spelled(output, position.sampled.token_id), position


def _top(output: TextOutput, position: TokenLogprobs) -> dict[str, float]:
    return {_spelled(output, e.token_id): finite(e.logprob) for e in (*position.top, position.sampled)}


def _spelled(output: TextOutput, token_id: int) -> str:
    return spell(output, token_id).decode("utf-8", "replace")
