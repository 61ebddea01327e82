"""Chat messages as clients send them, brought to the form that chat templates expect.

Templates index into messages without looking, so whatever they cannot take is refused here, by name. Does not know
the template itself.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest

MAX_DEPTH = 64
MAX_KWARGS_BYTES = 64 << 10


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Check messages and join their text parts.

    Content given as `[{"type": "text", "text": ...}]` becomes one string, the parts joined by newlines, unless there
    are images between them; the JSON
    arguments of tool calls become objects. Other keys are passed on as they are.

    Raises:
        InvalidRequest: naming the message at fault.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", "messages")
    check_depth(messages, "messages")
    return [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]


def check_depth(value: object, param: str) -> None:
    """Refuse JSON nested more than `MAX_DEPTH` deep: what handles it later recurses.

    Raises:
        InvalidRequest: naming `param`.
    """
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise InvalidRequest(f"{param} is nested more than {MAX_DEPTH} levels deep", param)


def check_template_kwargs(kwargs: dict[str, Any]) -> None:
    """Refuse more than any template has use for: they are passed on from process to process.

    Raises:
        InvalidRequest: naming the field.
    """
    try:
        is_large = len(msgspec.json.encode(kwargs)) > MAX_KWARGS_BYTES
    except RecursionError:
        is_large = False  # but deep
    if is_large:
        raise InvalidRequest(f"chat_template_kwargs: at most {MAX_KWARGS_BYTES} bytes", "chat_template_kwargs")
    check_depth(kwargs, "chat_template_kwargs")


def _children(node: object) -> list[object]:
    if isinstance(node, dict):
        return [child for child in node.values() if isinstance(child, dict | list)]
    if isinstance(node, list):
        return [child for child in node if isinstance(child, dict | list)]
    return []


def _normalize(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} must be an object with a role and content", "messages")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where}.role must be a string", "messages")
    normal = dict(message)
    if "content" in message:
        normal["content"] = _content_text(message["content"], where)
    elif not message.get("tool_calls"):
        raise InvalidRequest(f"{where} has no content", "messages")
    if message.get("tool_calls") is not None:
        normal["tool_calls"] = _tool_calls(message["tool_calls"], where)
    return normal


def _content_text(content: object, where: str) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", "messages")
    parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(part: object, where: str) -> dict[str, Any]:
    """A part of a message. An image that has been taken out of it is a part without a URL."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in ("text", "image_url", "image"):
        raise InvalidRequest(f"{where}: only text parts and image_url are supported, got type {kind!r}", "messages")
    if kind == "image":
        return {"type": "image"}
    if kind == "image_url":
        return {"type": "image_url", "image_url": {"url": _url(part.get("image_url"), where)}}
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", "messages")
    return {"type": "text", "text": part["text"]}


def _url(given: object, where: str) -> str:
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise InvalidRequest(f"{where}.image_url must be an object with a url", "messages")
    return url


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list", "messages")
    return [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be an object with a function and its name", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
            check_depth(arguments, "messages")
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{where}.function.arguments is not JSON", "messages") from error
    return {**call, "function": {**function, "arguments": arguments}}
