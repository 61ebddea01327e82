"""POST /v1/completions."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.messages import GenerateText
from tokenmill.sampling_params import SamplingParams
from tokenmill.server.body import read_body
from tokenmill.server.context import ServerContext
from tokenmill.server.fields import (
    GenerationFields,
    Int32,
    TokenId,
    check_logprobs,
    checked_truncation,
    refuse_unsupported,
    sampling_params,
    wants_prompt,
)
from tokenmill.server.prompt_format import PromptShown
from tokenmill.server.reply import GenerationReply
from tokenmill.server.reply_format import ChoiceWriter, ReplyHead, StreamPlan
from tokenmill.server.text_format import TEXT, TextFormat

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256
MAX_CHOICES = 1024


class TextBody(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Int32 | None = None
    echo: bool | None = None


class TextRoute:
    """Answers text completion requests."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        """Complete one prompt or several."""
        context = self._context
        body = await read_body(request, TextBody)
        context.check_model(body.model)
        refuse_unsupported(body)
        if body.logprobs is not None:
            check_logprobs(body.logprobs, "logprobs", context.max_logprobs)
        max_tokens = body.max_tokens
        if max_tokens is None:
            max_tokens = context.default_sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
        if body.prompt_logprobs is not None:
            check_logprobs(body.prompt_logprobs, "prompt_logprobs", context.max_logprobs)
        params = sampling_params(body, context.default_sampling, max_tokens, body.logprobs)
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            params = msgspec.structs.replace(params, prompt_logprobs=body.logprobs)
        prompts = [self._prompt(body, params, prompt) for prompt in split_prompts(body.prompt, "prompt")]
        check_num_choices(len(prompts), params.n)
        plan = StreamPlan.of(body)
        head = ReplyHead(
            id=f"cmpl-{body.request_id or request.state.request_id}",
            object=TEXT,
            created=int(time.time()),
            model=context.model_name,
            system_fingerprint=context.fingerprint,
        )
        writer = ChoiceWriter(head, TextFormat(PromptShown.of(body), bool(body.echo)), plan)
        return GenerationReply(context, prompts, writer, head.id, plan)

    def _prompt(self, body: TextBody, params: SamplingParams, prompt: str | list[int]) -> GenerateText:
        return GenerateText(
            ids=[],
            params=params,
            text=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
            priority=self._context.check_priority(body.priority),
            cache_salt=body.cache_salt or "",
            truncate_prompt_tokens=checked_truncation(body.truncate_prompt_tokens),
            wants_prompt=bool(body.echo) or wants_prompt(body),
        )


def check_num_choices(num_prompts: int, n: int) -> None:
    """Refuse more continuations than one call may ask for.

    Raises:
        InvalidRequest: naming `n`.
    """
    if num_prompts * n > MAX_CHOICES:
        raise InvalidRequest(f"{num_prompts} prompts with n={n} exceed {MAX_CHOICES} choices", "n")


def split_prompts(prompt: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """A prompt is a string, token ids, or a list of either.

    Raises:
        InvalidRequest: naming `param`.
    """
    if isinstance(prompt, str):
        return [prompt]
    token_ids = [item for item in prompt if isinstance(item, int)]
    if token_ids and len(token_ids) == len(prompt):
        return [token_ids]
    if token_ids or not prompt:
        raise InvalidRequest(f"{param} must be a string, a list of token ids, or a list of those, not empty", param)
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"{len(prompt)} prompts in one request; at most {MAX_PROMPTS}", param)
    return [item for item in prompt if not isinstance(item, int)]
