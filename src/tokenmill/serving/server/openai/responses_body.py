"""Parse the body of /v1/responses and turn it into a call."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.frontend.chat_messages import check_depth
from tokenmill.serving.server.generation.call import GenerationCall, template_kwargs
from tokenmill.serving.server.generation.fields import Int32, Int64, Label, PositiveInt, Tools, given_params
from tokenmill.serving.server.generation.tool_pictures import pictures_behind_results
from tokenmill.serving.server.openai.fields import ReasoningEffort
from tokenmill.serving.server.openai.response_format import JsonSchemaFormat, ResponseFormat, structured_outputs
from tokenmill.serving.server.openai.response_tools import ResponseTools, custom_arguments, flat_name, read_choice

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")
_MEDIA_PARTS = ("input_image", "input_audio")
# Of these, something would be missing that stands elsewhere. All other kinds that are not known are left out.
_REFUSED = ("item_reference",)
_READ = ("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", "reasoning")
_EFFORTS = frozenset(get_args(ReasoningEffort))
ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The field `text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextField(msgspec.Struct, forbid_unknown_fields=True):
    """The field `text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningField(msgspec.Struct, forbid_unknown_fields=True):
    """The field `reasoning`; the thinking itself is shown, without summaries.

    Newer clients have newer words for an effort: what is no `ReasoningEffort` is left out.
    """

    effort: Label | None = None
    summary: str | None = None


class ResponsesBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: Label | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    seed: Int64 | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    top_logprobs: Int32 | None = None
    truncation: Literal["disabled", "auto"] | None = None
    priority: Int32 | None = None
    cache_salt: Label | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None

    # Of these, ENCRYPTED and LOGPROBS have an effect; others ask for parts of answers that do not come here.
    include: Annotated[list[Label], Meta(max_length=64)] | None = None
    # Calls of one key go to one engine.
    prompt_cache_key: str | None = None

    # Accepted without effect: they concern OpenAI's own bookkeeping, and no context is shortened here.
    context_management: list[dict[str, Any]] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    client_metadata: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None

    # Refused: the answer would lack what stands in them.
    conversation: Any = None
    prompt: Any = None


def response_call(body: ResponsesBody, tools: ResponseTools, earlier: list[dict[str, Any]]) -> GenerationCall:
    """Return the call that a body asks for.

    Args:
        tools: those of the body.
        earlier: the messages of the response that this one continues.

    Raises:
        InvalidRequest: naming the item at fault.
    """
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is not supported by this server", name)
    check_depth(body.input, "input")
    check_depth(body.tools, "tools")
    messages = pictures_behind_results([*earlier, *input_messages(body.input)])
    if body.instructions is not None:
        messages = with_instructions(body.instructions, messages)
    params = given_params(body)
    if body.max_output_tokens is not None:
        params["max_tokens"] = body.max_output_tokens
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        params["logprobs"] = body.top_logprobs or 0
    if body.text is not None and body.text.format is not None:
        params["structured_outputs"] = structured_outputs(_response_format(body.text.format), None)
    effort = None if body.reasoning is None or body.reasoning.effort not in _EFFORTS else body.reasoning.effort
    return GenerationCall(
        model=body.model,
        params=params,
        messages=messages,
        tools=tools.functions or None,
        tool_choice=read_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        logprobs_field="top_logprobs",
        template_kwargs=template_kwargs(body.chat_template_kwargs, reasoning_effort=effort),
        priority=body.priority,
        cache_salt=body.cache_salt,
        stream=body.stream,
        timeout=body.timeout,
        conversation=body.prompt_cache_key or body.user,
        session_key=body.prompt_cache_key or "",
    )


def left_out(body: ResponsesBody, tools: ResponseTools) -> list[str]:
    """Return what the answer cannot heed, by place and kind."""
    asked = [f"include:{name}" for name in body.include or () if name not in (ENCRYPTED, LOGPROBS)]
    effort = None if body.reasoning is None else body.reasoning.effort
    efforts = [f"reasoning.effort:{effort[:40]}"] if effort is not None and effort not in _EFFORTS else []
    return [*tools.left_out, *unread_items(body.input), *asked, *efforts]


def with_instructions(instructions: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages behind instructions; a system text at their beginning joins them: many templates take one."""
    first = messages[0] if messages else {}
    if first.get("role") != "system" or not isinstance(first["content"], str):
        return [{"role": "system", "content": instructions}, *messages]
    texts = [text for text in (instructions, first["content"]) if text]
    return [first | {"content": "\n\n".join(texts)}, *messages[1:]]


def unread_items(given: str | list[dict[str, Any]]) -> list[str]:
    """Return where items stand that `input_messages` leaves out, and their type."""
    kinds = [] if isinstance(given, str) else [str(item.get("type") or "message") for item in given]
    return [f"input[{i}]:{kind[:40]}" for i, kind in enumerate(kinds) if kind not in (*_READ, *_REFUSED)]


def input_messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of an input, a text or a list of items; successive calls become one message.

    Raises:
        InvalidRequest: naming the item at fault.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        _add_item(messages, item, f"input[{i}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add an item to messages; thinking is not shown to the model again, nor what `unread_items` lists."""
    kind = item.get("type") or "message"
    match kind:
        case "message":
            _add_message(messages, item, where)
        case "function_call":
            _add_call(messages, item, _field(item, "arguments", where), where)
        case "custom_tool_call":
            _add_call(messages, item, custom_arguments(_field(item, "input", where)), where)
        case "function_call_output" | "custom_tool_call_output":
            result = _content(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": _field(item, "call_id", where), "content": result})
    if kind in _REFUSED:
        raise InvalidRequest(f"{where}: items of type {kind} are not supported", "input")


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    role = _ROLES.get(_field(item, "role", where))
    if role is None:
        raise InvalidRequest(f"{where}.role must be user, assistant, system or developer", "input")
    content, last = _content(item.get("content"), f"{where}.content"), messages[-1] if messages else {}
    if role == "assistant" and isinstance(content, str) and last.get("tool_calls"):
        # Said between a call and its result: templates want the result right behind the call.
        last["content"] = "\n".join(text for text in (last["content"], content) if text)
    elif role == "system" and last.get("role") == "system" and isinstance(content, str):
        last["content"] = f"{last['content']}\n\n{content}"
    else:
        messages.append({"role": role, "content": content})


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any], arguments: str, where: str) -> None:
    """Add a call to the latest message of the assistant, or begin one."""
    namespace = item.get("namespace")
    name = flat_name(_field(item, "name", where), namespace if isinstance(namespace, str) else "")
    function = {"name": name, "arguments": arguments}
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": ""})
    call = {"id": _field(item, "call_id", where), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _content(content: object, where: str) -> str | list[dict[str, Any]]:
    """Return the text of a message, or its parts in the form of chats if there are images or sound between them."""
    parts = content if isinstance(content, list) else []
    if not any(isinstance(part, dict) and part.get("type") in _MEDIA_PARTS for part in parts):
        return _text(content, where)
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(parts)]


def _part(part: object, where: str) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") == "input_image":
        return {"type": "image_url", "image_url": {"url": _field(part, "image_url", where)}}
    if isinstance(part, dict) and part.get("type") == "input_audio":
        clip = part.get("input_audio")
        if not isinstance(clip, dict):
            raise InvalidRequest(f"{where}.input_audio must be an object with data, in base64, and a format", "input")
        return {"type": "input_audio", "input_audio": {"data": _field(clip, "data", f"{where}.input_audio")}}
    return {"type": "text", "text": _text([part], where)}


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of text parts", "input")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}[{i}]: only text parts are supported, got {str(kind)[:40]}", "input")
    return "\n".join(part["text"] for part in content)


def _field(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a string", "input")
    return value


def _response_format(format: TextFormat) -> ResponseFormat:
    if format.type != "json_schema":
        return ResponseFormat(format.type, schema=format.schema)
    if format.schema is None:
        raise InvalidRequest("text.format.schema is missing", "text")
    return ResponseFormat(
        "json_schema", JsonSchemaFormat(format.name, format.description, format.schema, format.strict)
    )
