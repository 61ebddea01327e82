"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.errors import InvalidRequest
from tokenmill.frontend.chat_messages import check_template_kwargs, normalize_messages
from tokenmill.messages import GenerateText
from tokenmill.server.answer_reader import AnswerReader
from tokenmill.server.body import read_body
from tokenmill.server.chat_format import CHAT, CHAT_CHUNK, ChatFormat
from tokenmill.server.context import ServerContext
from tokenmill.server.fields import (
    GenerationFields,
    Int32,
    PositiveInt,
    check_logprobs,
    checked_truncation,
    refuse_unsupported,
    sampling_params,
    wants_prompt,
)
from tokenmill.server.prompt_format import PromptShown
from tokenmill.server.reply import GenerationReply
from tokenmill.server.reply_format import ChoiceWriter, ReplyHead, StreamPlan
from tokenmill.server.tool_fields import ToolUse, tool_use

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatBody(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None
    reasoning_effort: ReasoningEffort | None = None


class ChatRoute:
    """Answers chat requests."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        """Complete a conversation."""
        context = self._context
        body = await read_body(request, ChatBody)
        prompt = self.prompt(body)
        plan = StreamPlan.of(body)
        head = ReplyHead(
            id=f"chatcmpl-{body.request_id or request.state.request_id}",
            object=CHAT_CHUNK if plan.stream else CHAT,
            created=int(time.time()),
            model=context.model_name,
            system_fingerprint=context.fingerprint,
        )
        style = self.tool_use(body).style
        format = ChatFormat(style, return_token_ids=bool(body.return_token_ids))
        return GenerationReply(
            context, [prompt], ChoiceWriter(head, format, plan, PromptShown.of(body).fields), head.id, plan
        )

    def prompt(self, body: ChatBody) -> GenerateText:
        """The prompt of a chat, however it came.

        Raises:
            InvalidRequest: naming the field at fault.
        """
        context = self._context
        context.check_model(body.model)
        context.check_count(body.messages)
        refuse_unsupported(body)
        if body.echo:
            raise InvalidRequest("echo is for texts: send it to /v1/completions", "echo")
        if body.prompt_logprobs is not None:
            check_logprobs(body.prompt_logprobs, "prompt_logprobs", context.max_logprobs)
        use = self.tool_use(body)
        params = sampling_params(body, context.default_sampling, _max_tokens(body), self._logprobs(body))
        if use.style.needs_special_tokens:
            params = msgspec.structs.replace(params, skip_special_tokens=False)
        return GenerateText(
            ids=[],
            params=params,
            messages=normalize_messages(body.messages),
            tools=use.tools,
            calls=use.rules,
            reasoning=use.style.reasoning,
            template_kwargs=template_kwargs(body),
            priority=context.check_priority(body.priority),
            cache_salt=body.cache_salt or "",
            truncate_prompt_tokens=checked_truncation(body.truncate_prompt_tokens),
            wants_prompt=wants_prompt(body),
        )

    def reader(self, body: ChatBody) -> AnswerReader:
        """What reads the answer to this chat."""
        return AnswerReader(self.tool_use(body).style.parser)

    def tool_use(self, body: ChatBody) -> ToolUse:
        """What a chat's tools come to, and how its answers are taken apart.

        Raises:
            InvalidRequest: naming the field at fault.
        """
        is_parallel = body.parallel_tool_calls is not False
        return tool_use(body.tools, body.tool_choice, is_parallel, self._context.parsers)

    def _logprobs(self, body: ChatBody) -> int | None:
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        if not body.logprobs:
            return None
        check_logprobs(body.top_logprobs or 0, "top_logprobs", self._context.max_logprobs)
        return body.top_logprobs or 0


def template_kwargs(body: ChatBody) -> dict[str, Any]:
    """The variables a chat template gets besides the messages."""
    kwargs = dict(body.chat_template_kwargs or {})
    check_template_kwargs(kwargs)
    for name in ("add_generation_prompt", "continue_final_message", "reasoning_effort"):
        if getattr(body, name) is not None:
            kwargs[name] = getattr(body, name)
    return kwargs


def _max_tokens(body: ChatBody) -> int | None:
    return body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
