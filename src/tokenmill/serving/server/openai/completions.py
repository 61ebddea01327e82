"""Serve POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.infill import Infill
from tokenmill.core.messages import GenerateText, TextOutput
from tokenmill.core.plan import TokenLogprobs
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, Prompt, messages_of, split_prompts
from tokenmill.serving.server.generation.fields import Int32, TokenId
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.generation.session_reply import SessionReply, session_of
from tokenmill.serving.server.generation.writer import finite, positions, token_bytes
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.openai.chunks import (
    ChoiceWriter,
    PromptFields,
    PromptShown,
    ReplyHead,
    finish_reason_text,
)
from tokenmill.serving.server.openai.fields import GenerationFields, call_of
from tokenmill.serving.server.openai.session_turns import TextTurn
from tokenmill.serving.server.session_store import Session

TEXT = "text_completion"
DEFAULT_MAX_TOKENS = 16


class TextBody(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/completions; with a `suffix`, the text between it and the prompt is asked for."""

    prompt: str | list[str | TokenId | list[TokenId]]
    suffix: str | None = None
    logprobs: Int32 | None = None
    echo: bool | None = None


class TextRoute:
    """The handler of /v1/completions."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        """Complete one or more prompts."""
        return await self.answer(request, session_of(self._context, request.scope, "text"))

    async def answer(self, request: Request, session: Session | None) -> Response:
        """Complete prompts, or the text that a session began."""
        context = self._context
        body, call, prompts = await read_as(request, TextBody, context.bodies, self._read)
        head = ReplyHead(
            id=f"cmpl-{body.request_id or request.state.request_id}",
            object=TEXT,
            created=int(time.time()),
            model=context.reply_name(body.model),
            system_fingerprint=context.fingerprint,
        )
        choices = TextChoices(PromptShown.from_fields(body), bool(body.echo))
        if session is None:
            return GenerationReply(context, call, prompts, ChoiceWriter(head, choices, call), head.id)
        turn = TextTurn(context, session, call, choices)
        return SessionReply(context, session, call, turn, ChoiceWriter(head, turn, call), head.id)

    def _read(self, body: TextBody) -> tuple[TextBody, GenerationCall, list[GenerateText]]:
        self._context.check_model(body.model)
        call = text_call(body)
        return body, call, messages_of(call, self._context)


def text_call(body: TextBody) -> GenerationCall:
    """Return the call that a body asks for.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    call = call_of(body)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1, or 0 with echo", "max_tokens")
    if body.max_tokens == 0:
        call.params["max_tokens"] = 1  # whose logits are those of the prompt's end; it is not shown
    if body.logprobs is not None:
        call.params["logprobs"] = body.logprobs
        if body.echo:  # the prompt's come before those of the text
            call.params.setdefault("prompt_logprobs", body.logprobs)
    return msgspec.structs.replace(
        call,
        prompts=_prompts(body),
        default_max_tokens=DEFAULT_MAX_TOKENS,
        wants_prompt=bool(body.echo) or call.wants_prompt,
        is_score=body.max_tokens == 0,
    )


def _prompts(body: TextBody) -> Sequence[Prompt]:
    prompts = split_prompts(body.prompt, "prompt")
    if not body.suffix:
        return prompts
    if body.echo:
        raise InvalidRequest("echo shows a prompt as it was sent, which one with a suffix is not", "echo")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise InvalidRequest("suffix needs prompts that are texts, not token ids", "suffix")
    return [Infill(text, body.suffix) for text in texts]


class TextLogprobs(msgspec.Struct):
    """The field `logprobs` of a choice: parallel lists over its tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(PromptFields, kw_only=True):
    """A choice of a document or a chunk."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class TextChoices:
    """A `ChoiceEncoder` for the choices of one text completion."""

    def __init__(self, shown: PromptShown, echo: bool = False) -> None:
        """Encode choices; `echo`: put the prompt and its log probabilities before those of the text."""
        self._echo = echo
        self._shown = shown
        self._offsets: dict[int, int] = {}

    def chunk_choices(self, index: int, output: TextOutput) -> list[TextChoice]:
        """Return the choice for a delta, if it is worth sending."""
        if output.text or output.logprobs or output.prompt or output.finish_reason is not None or self._shown.token_ids:
            return [self.choice(index, output)]
        return []

    def choice(self, index: int, output: TextOutput) -> TextChoice:
        """Return a choice with the text of an output."""
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
        """Return tokens with their log probabilities, the echoed prompt's first; its first token has no probability."""
        if self._echo and output.prompt is not None:
            yield _token(output, output.prompt.token_ids[0]), None
            for position in output.prompt.logprobs or ():
                yield _token(output, position.sampled.token_id), position
        for position in positions(output):
            yield _token(output, position.sampled.token_id), position


def _top(output: TextOutput, position: TokenLogprobs) -> dict[str, float]:
    return {_token(output, e.token_id): finite(e.logprob) for e in (*position.top, position.sampled)}


def _token(output: TextOutput, token_id: int) -> str:
    return token_bytes(output, token_id).decode("utf-8", "replace")
