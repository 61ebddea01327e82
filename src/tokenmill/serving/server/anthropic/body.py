"""Parse Anthropic's form of a chat and turn it into a call."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.serving.frontend.chat_messages import check_depth
from tokenmill.serving.frontend.thinking_budget import EFFORTS
from tokenmill.serving.server.generation.call import GenerationCall, template_kwargs
from tokenmill.serving.server.generation.fields import Int32, PositiveInt, StopStrings, Tools, given_params
from tokenmill.serving.server.generation.tool_pictures import pictures_behind_results
from tokenmill.serving.server.generation.tools import NamedTool

# Blocks of thinking are the model's own and are not shown to it again.
_SKIPPED = ("thinking", "redacted_thinking")
# In these the client shows something to the model; all kinds that are not known are left out.
_SHOWN = ("text", "image", "document", "search_result", "tool_use", "tool_result")
# Anthropic has none of these; who sends one means sound to be heard.
_SOUND = ("audio", "input_audio", "audio_url")


class Thinking(msgspec.Struct):
    """The field `thinking`; without a budget the model decides for itself how much it thinks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int32 | None = None
    display: str | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The field `output_config.format`."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The field `output_config`; an effort that has a budget is one, beside no budget of `thinking`."""

    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class PromptBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that make the prompt: the body of /v1/messages/count_tokens."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Without effect: nothing is cut out of a conversation here.
    context_management: dict[str, Any] | None = None
    # Refused unless they ask for nothing.
    container: Any = None
    mcp_servers: Any = None


class MessagesBody(PromptBody, forbid_unknown_fields=True, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: PositiveInt
    stop_sequences: StopStrings | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    # Without effect: prefixes are cached in any case, and the rest is Anthropic's own bookkeeping.
    cache_control: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


def message_call(body: PromptBody) -> GenerationCall:
    """Return the call that a body asks for.

    Raises:
        InvalidRequest: naming the message or the block at fault.
    """
    for name in ("container", "mcp_servers"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not supported by this server", name)
    for name in ("messages", "system", "tools"):
        check_depth(getattr(body, name), name)
    messages = [message for i, one in enumerate(body.messages) for message in _messages(one, f"messages[{i}]")]
    if body.system is not None:
        _text(body.system, "system", "system")  # which refuses blocks of other kinds
        messages.insert(0, {"role": "system", "content": body.system})
    messages = pictures_behind_results(messages)
    # Anthropic's way to begin the answer for the model: it goes on from there.
    last = messages[-1] if messages else {}
    continues = last.get("role") == "assistant" and bool(last["content"]) and "tool_calls" not in last
    choice = body.tool_choice
    params = given_params(body)
    if isinstance(body, MessagesBody) and body.stop_sequences is not None:
        params["stop"] = body.stop_sequences
    if body.output_config is not None and body.output_config.format is not None:
        params["structured_outputs"] = StructuredOutputs(json=body.output_config.format.schema, param="output_config")
    budget = _thinking_budget(body)
    if budget is not None:
        params["thinking_token_budget"] = budget
    return GenerationCall(
        model=body.model,
        params=params,
        messages=messages,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ()) if _is_ours(tool)] or None,
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        template_kwargs=template_kwargs(
            None,
            enable_thinking=None if body.thinking is None else body.thinking.type != "disabled",
            continue_final_message=continues or None,
        ),
        stream=body.stream if isinstance(body, MessagesBody) else None,
        conversation=_user(body),
    )


def _thinking_budget(body: PromptBody) -> int | None:
    """Return how many tokens the model may think, if the body says so."""
    given = None if body.thinking is None else body.thinking.budget_tokens
    effort = None if body.output_config is None else body.output_config.effort
    if given is not None and given < 0:
        raise InvalidRequest(f"thinking.budget_tokens must be at least 0, got {given}", "thinking")
    return given if given is not None else EFFORTS.get(effort or "")


def _user(body: PromptBody) -> str | None:
    """Return the name of the user, by which clients tell sessions apart too."""
    metadata = body.metadata if isinstance(body, MessagesBody) else None
    user = (metadata or {}).get("user_id")
    return user if isinstance(user, str) else None


def left_out(body: PromptBody) -> list[str]:
    """Return which tools and blocks the model is not shown, because they belong to Anthropic's servers, by place."""
    tools = [f"tools[{i}]:{str(tool['type'])[:40]}" for i, tool in enumerate(body.tools or ()) if not _is_ours(tool)]
    blocks = [
        f"messages[{i}].content[{j}]:{kind[:40]}"
        for i, message in enumerate(body.messages)
        for j, block in enumerate(_blocks(message.get("content")))
        for kind in (block.get("type"), *(inner.get("type") for inner in _blocks(block.get("content"))))
        if isinstance(kind, str) and kind not in (*_SHOWN, *_SKIPPED)
    ]
    return [*tools, *blocks]


def _blocks(content: object) -> list[dict[str, Any]]:
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _known(content: Any, where: str) -> Any:
    """Return the content of a tool result without blocks of kinds that are not known."""
    if not isinstance(content, list):
        return content
    kinds = [_kind(block, f"{where}[{i}]") for i, block in enumerate(content)]
    return [block for block, kind in zip(content, kinds, strict=True) if kind in (*_SHOWN, None)]


def _kind(block: Any, where: str) -> Any:
    """Return the type of a block; None: it has none.

    Raises:
        InvalidRequest: it is sound, which would be left out in silence.
    """
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in _SOUND:
        other = "input_audio in /v1/chat/completions and /v1/responses"
        raise InvalidRequest(f"{where}: this API has no blocks of sound; send it as {other}", "messages")
    return kind


def _is_ours(tool: dict[str, Any]) -> bool:
    """Return True for a tool that the client runs; the others have a type with a date, and no schema."""
    return tool.get("type") in (None, "custom") or "input_schema" in tool


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return a message of Anthropic's as one or more of OpenAI's: each tool result is a message of its own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise InvalidRequest(f"{where}.role must be user or assistant", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of blocks", "messages")
    shown: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for i, part in enumerate(content):
        place = f"{where}.content[{i}]"
        kind = _kind(part, place)
        if kind == "text":
            shown.append({"type": "text", "text": _field(part, "text", str, place)})
        elif kind == "image" and role == "user":
            shown.append(_image(_field(part, "source", dict, place), f"{place}.source"))
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(part, place))
        elif kind == "tool_result" and role == "user":
            call_id = _field(part, "tool_use_id", str, place)
            result = _result(_known(part.get("content") or "", f"{place}.content"), f"{place}.content")
            results.append({"role": "tool", "tool_call_id": call_id, "content": result})
        elif not isinstance(kind, str) or kind in _SHOWN:
            name = kind or "unknown"
            raise InvalidRequest(
                f"{place}: a block of type {str(name)[:40]} is not supported in a {role} message", "messages"
            )
    has_images = any(part["type"] != "text" for part in shown)
    own: dict[str, Any] = {"role": role, "content": shown if has_images else "\n".join(part["text"] for part in shown)}
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if shown or calls or not results else results


def _result(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a tool result: a text, or content parts where there are images between its texts."""
    if not any(block.get("type") == "image" for block in _blocks(content)):
        return _text(content, where, "messages")
    parts: list[dict[str, Any]] = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        if isinstance(block, dict) and block.get("type") == "image":
            parts.append(_image(_field(block, "source", dict, place), f"{place}.source"))
        else:
            parts.append({"type": "text", "text": _text([block], place, "messages")})
    return parts


def _image(source: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the source of an image block as a content part in OpenAI's form."""
    if source.get("type") == "url":
        url = _field(source, "url", str, where)
    elif source.get("type") == "base64":
        url = f"data:{_field(source, 'media_type', str, where)};base64,{_field(source, 'data', str, where)}"
    else:
        raise InvalidRequest(f"{where}.type must be base64 or url", "messages")
    return {"type": "image_url", "image_url": {"url": url}}


def _call(part: dict[str, Any], where: str) -> dict[str, Any]:
    given = part.get("input")
    # A text is what could not be read as JSON: the answer was cut within it.
    arguments = given if isinstance(given, str) else msgspec.json.encode(_field(part, "input", dict, where)).decode()
    function = {"name": _field(part, "name", str, where), "arguments": arguments}
    return {"id": _field(part, "id", str, where), "type": "function", "function": function}


def _text(content: str | list[dict[str, Any]], where: str, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of text blocks", param)
    for i, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise InvalidRequest(f"{where}[{i}]: only text blocks are supported here", param)
    return "\n".join(part["text"] for part in content)


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    schema = _field(tool, "input_schema", dict, where, "tools")
    function = {"name": _field(tool, "name", str, where, "tools"), "parameters": schema}
    if tool.get("strict") is True:
        function["strict"] = True
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> str | NamedTool:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if not choice.name:
        raise InvalidRequest("tool_choice of type tool needs a name", "tool_choice")
    return NamedTool(choice.name)


def _field(part: dict[str, Any], name: str, kind: type, where: str, param: str = "messages") -> Any:
    value = part.get(name)
    if not isinstance(value, kind):
        expected = {"str": "a string", "dict": "an object"}[kind.__name__]
        raise InvalidRequest(f"{where}.{name} must be {expected}", param)
    return value
