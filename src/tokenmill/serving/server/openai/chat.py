"""Serve POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, messages_of, template_kwargs
from tokenmill.serving.server.generation.fields import Int32, PositiveInt, Tools
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.generation.session_reply import SessionReply, session_of
from tokenmill.serving.server.generation.tools import NamedTool
from tokenmill.serving.server.http.body import read_as
from tokenmill.serving.server.openai.chat_choices import CHAT, CHAT_CHUNK, ChatChoices
from tokenmill.serving.server.openai.chunks import ChoiceWriter, PromptShown, ReplyHead
from tokenmill.serving.server.openai.fields import GenerationFields, ReasoningEffort, call_of
from tokenmill.serving.server.openai.functions import (
    FunctionChoices,
    asks_for_functions,
    choice_of,
    messages_with_tools,
    tools_of,
)
from tokenmill.serving.server.openai.session_turns import ChatTurn
from tokenmill.serving.server.session_store import Session


class ChatBody(GenerationFields, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Tools | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: Int32 | None = None


class ChatRoute:
    """The handler of /v1/chat/completions."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def post(self, request: Request) -> Response:
        """Complete a conversation."""
        return await self.answer(request, session_of(self._context, request.scope, "chat"))

    async def answer(self, request: Request, session: Session | None) -> Response:
        """Complete a conversation: that of the body, or the one that a session began."""
        context = self._context
        body, call, prompts = await read_as(request, ChatBody, context.bodies, self._read)
        head = ReplyHead(
            id=f"chatcmpl-{body.request_id or request.state.request_id}",
            object=CHAT_CHUNK if call.stream else CHAT,
            created=int(time.time()),
            model=context.reply_name(body.model),
            system_fingerprint=context.fingerprint,
        )
        kind = FunctionChoices if asks_for_functions(body.functions, body.function_call) else ChatChoices
        choices = kind(context.parsers.notation, bool(body.return_token_ids), body.include_reasoning is not False)
        extras = PromptShown.from_fields(body).fields
        if session is None:
            writer = ChoiceWriter(head, choices, call, extras)
            return GenerationReply(context, call, prompts, writer, head.id)
        if body.functions:
            raise InvalidRequest("a session keeps calls of tools: send the functions as tools", "functions")
        turn = ChatTurn(context, session, call, choices)
        return SessionReply(context, session, call, turn, ChoiceWriter(head, turn, call, extras), head.id)

    def _read(self, body: ChatBody) -> tuple[ChatBody, GenerationCall, list[GenerateText]]:
        self._context.check_model(body.model)
        call = chat_call(body)
        return body, call, messages_of(call, self._context)


def chat_call(body: ChatBody) -> GenerationCall:
    """Return the call that a body asks for.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    call = call_of(body)
    if body.echo:
        raise InvalidRequest("echo is for texts: send it to /v1/completions", "echo")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.logprobs:
        call.params["logprobs"] = body.top_logprobs or 0
    if body.max_completion_tokens is not None:
        call.params["max_tokens"] = body.max_completion_tokens
    tools, choice, is_parallel = body.tools, _tool_choice(body.tool_choice), body.parallel_tool_calls
    if asks_for_functions(body.functions, body.function_call):
        if tools or choice is not None:
            raise InvalidRequest("functions are the older name of tools: send only one of them", "functions")
        functions = body.functions or []
        tools, choice, is_parallel = tools_of(functions), choice_of(body.function_call, functions), False
    return msgspec.structs.replace(
        call,
        messages=messages_with_tools(body.messages),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
        template_kwargs=template_kwargs(
            body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            reasoning_effort=body.reasoning_effort,
        ),
        logprobs_field="top_logprobs",
    )


def _tool_choice(choice: str | dict[str, Any] | None) -> str | NamedTool | None:
    """Return `tool_choice`; `{"type": "function", "function": {"name": ...}}` names a function."""
    if not isinstance(choice, dict):
        return choice
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not (isinstance(name, str) and name):
        raise InvalidRequest("tool_choice.function.name is missing", "tool_choice")
    return NamedTool(name)
