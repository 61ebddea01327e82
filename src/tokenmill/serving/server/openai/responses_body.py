"""Parse the body of /v1/responses and turn it into a call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.frontend.chat_messages import check_depth
from tokenmill.serving.server.generation.call import GenerationCall, template_kwargs
from tokenmill.serving.server.generation.fields import Int32, Int64, Label, PositiveInt, Tools, given_params
from tokenmill.serving.server.generation.tools import NamedTool
from tokenmill.serving.server.openai.fields import ReasoningEffort
from tokenmill.serving.server.openai.response_format import JsonSchemaFormat, ResponseFormat, structured_outputs

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")


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
    """The field `reasoning`; the thinking itself is shown, without summaries."""

    effort: ReasoningEffort | None = None
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
    truncation: Literal["disabled"] | None = None
    priority: Int32 | None = None
    cache_salt: Label | None = None
    timeout: Annotated[float, Meta(gt=0, le=86400)] | None = None

    # Accepted without effect: agents ask for it in every request, and the thinking is shown as it is.
    include: list[Literal["reasoning.encrypted_content"]] | None = None

    # Accepted without effect: they concern OpenAI's own bookkeeping, and no context is shortened here.
    context_management: list[dict[str, Any]] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    # Refused: the answer would lack what stands in them.
    conversation: Any = None
    prompt: Any = None


def response_call(body: ResponsesBody, earlier: list[dict[str, Any]]) -> GenerationCall:
    """Return the call that a body asks for.

    Args:
        earlier: the messages of the response that this one continues.

    Raises:
        InvalidRequest: naming the item at fault.
    """
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is not supported by this server", name)
    check_depth(body.input, "input")
    check_depth(body.tools, "tools")
    messages = [*earlier, *input_messages(body.input)]
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    params = given_params(body)
    if body.max_output_tokens is not None:
        params["max_tokens"] = body.max_output_tokens
    if body.text is not None and body.text.format is not None:
        params["structured_outputs"] = structured_outputs(_response_format(body.text.format), None)
    effort = None if body.reasoning is None else body.reasoning.effort
    return GenerationCall(
        model=body.model,
        params=params,
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools)] if body.tools else None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        template_kwargs=template_kwargs(body.chat_template_kwargs, reasoning_effort=effort),
        priority=body.priority,
        cache_salt=body.cache_salt,
        stream=body.stream,
        timeout=body.timeout,
        conversation=body.prompt_cache_key or body.user,
    )


def input_messages(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of an input, a text or a list of items; successive calls become one message.

    Raises:
        InvalidRequest: naming the item at fault.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        where = f"input[{i}]"
        match item.get("type") or "message":
            case "message":
                role = _ROLES.get(_field(item, "role", where))
                if role is None:
                    raise InvalidRequest(f"{where}.role must be user, assistant, system or developer", "input")
                messages.append({"role": role, "content": _content(item.get("content"), f"{where}.content")})
            case "function_call":
                function = {"name": _field(item, "name", where), "arguments": _field(item, "arguments", where)}
                call = {"id": _field(item, "call_id", where), "type": "function", "function": function}
                if not (messages and messages[-1]["role"] == "assistant"):
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(call)
            case "function_call_output":
                text = _text(item.get("output"), f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": _field(item, "call_id", where), "content": text})
            case "reasoning":
                pass  # thinking is not shown to the model again
            case other:
                raise InvalidRequest(f"{where}: items of type {str(other)[:40]} are not supported", "input")
    return messages


def _content(content: object, where: str) -> str | list[dict[str, Any]]:
    """Return the text of a message, or its parts in the form of chats if there are images between them."""
    parts = content if isinstance(content, list) else []
    if not any(isinstance(part, dict) and part.get("type") == "input_image" for part in parts):
        return _text(content, where)
    return [_part(part, f"{where}[{i}]") for i, part in enumerate(parts)]


def _part(part: object, where: str) -> dict[str, Any]:
    if isinstance(part, dict) and part.get("type") == "input_image":
        return {"type": "image_url", "image_url": {"url": _field(part, "image_url", where)}}
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


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest(f"{where}: only function tools are supported", "tools")
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | NamedTool | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise InvalidRequest("tool_choice must be none, auto, required, or a function with its name", "tool_choice")
    return NamedTool(choice["name"])


def _response_format(format: TextFormat) -> ResponseFormat:
    if format.type != "json_schema":
        return ResponseFormat(format.type, schema=format.schema)
    if format.schema is None:
        raise InvalidRequest("text.format.schema is missing", "text")
    return ResponseFormat(
        "json_schema", JsonSchemaFormat(format.name, format.description, format.schema, format.strict)
    )
