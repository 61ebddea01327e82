"""Convert chat messages from the form that clients send to the form that chat templates expect.

Templates index into messages without checks, so messages that they cannot take are refused here, by name. Does not
know the template itself.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.json_text import decode_json

MAX_DEPTH = 64
MAX_KWARGS_BYTES = 64 << 10
# More than any model is shown at once; what a server takes is less, see `MediaLimits`.
MAX_PICTURES = 4096
# At what rate the makers of such models sample videos, where a client does not say it.
FRAMES_PER_SECOND = 2.0
_PARTS = ("text", "image_url", "image", "video", "video_url", "input_audio", "audio_url", "audio")
_SOUND = ("input_audio", "audio_url", "audio")
_FRAMES = "data:video/jpeg;base64,"
_THINKING = ("reasoning_content", "reasoning")


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Check messages and join their text parts.

    Content given as `[{"type": "text", "text": ...}]` becomes one string, the parts joined by newlines, unless there
    are images, videos or sound between them; the JSON arguments of tool calls become objects, and arguments that are
    not JSON stay strings. A video becomes a list of the URLs of its frames, and sound a URL, however they were given.
    Earlier thinking gets every name that templates know. Other keys are passed on as they are.

    Raises:
        InvalidRequest: naming the message at fault.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", "messages")
    check_depth(messages, "messages")
    normal = [_normalize(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if (count := sum(_num_pictures(message.get("content")) for message in normal)) > MAX_PICTURES:
        raise InvalidRequest(
            f"messages have {count} images, frames and clips; at most {MAX_PICTURES} are read", "messages"
        )
    return normal


def check_depth(value: object, param: str) -> None:
    """Refuse JSON nested deeper than `MAX_DEPTH`: the code that handles it later is recursive.

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
    """Refuse template variables larger than any template needs: they are passed from process to process.

    Raises:
        InvalidRequest: naming the field.
    """
    check_size(kwargs, "chat_template_kwargs", MAX_KWARGS_BYTES)


def check_size(value: object, param: str, max_bytes: int) -> None:
    """Refuse JSON that takes more than `max_bytes` bytes, or is nested deeper than `MAX_DEPTH`.

    Raises:
        InvalidRequest: naming `param`.
    """
    try:
        is_large = len(msgspec.json.encode(value)) > max_bytes
    except RecursionError:
        is_large = False  # but deep
    if is_large:
        raise InvalidRequest(f"{param}: at most {max_bytes} bytes", param)
    check_depth(value, param)


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
    return normal | _thinking(normal)


def _thinking(message: dict[str, Any]) -> dict[str, str]:
    """Return a message's thinking under every name that templates know; empty for a message without it."""
    found = next((one for name in _THINKING if isinstance(one := message.get(name), str) and one), None)
    if found is None:
        return {}
    # gpt-oss's template, which has a name of its own, refuses it beside content.
    return dict.fromkeys(_THINKING, found) | ({} if message.get("content") else {"thinking": found})


def _content_text(content: object, where: str) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be a string or a list of parts", "messages")
    parts = [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _num_pictures(content: object) -> int:
    """Count the images, video frames and clips of sound in a message's content."""
    parts = content if isinstance(content, list) else ()
    return sum(len(part.get("video", "1")) for part in parts if part["type"] != "text")


def _part(part: object, where: str) -> dict[str, Any]:
    """Check and normalize a part; an image, video or clip that was extracted before is a part without a URL."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in _PARTS:
        sentence = f"{where}: only text, image_url, lists of frames and input_audio are supported, got type {kind!r}"
        raise InvalidRequest(sentence, "messages")
    if kind == "image" or (kind == "video" and "video" not in part):
        return {"type": kind}
    if kind == "image_url":
        return {"type": "image_url", "image_url": {"url": _url(part, kind, where)}}
    if kind in ("video", "video_url"):
        return _video(part, kind, where)
    if kind in _SOUND:
        return _clip(part, kind, where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", "messages")
    return {"type": "text", "text": part["text"]}


def _url(part: dict[str, Any], kind: str, where: str) -> str:
    given = part.get(kind)
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise InvalidRequest(f"{where}.{kind} must be an object with a url", "messages")
    return url


def _clip(part: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Return a clip of sound as vLLM's clients send it, by URL; OpenAI's send base64 and a format."""
    if kind != "input_audio":
        if kind == "audio" and "audio_url" not in part:
            return {"type": "audio"}
        return {"type": "audio_url", "audio_url": {"url": _url(part, "audio_url", where)}}
    given = part.get("input_audio")
    if not isinstance(given, dict) or not isinstance(given.get("data"), str):
        raise InvalidRequest(f"{where}.input_audio must be an object with data, in base64, and a format", "messages")
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/any;base64,{given['data']}"}}


def _video(part: dict[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Return a video as the URLs of its frames; vLLM clients join them into one URL with commas."""
    if kind == "video_url":
        url = _url(part, kind, where)
        if not url.startswith(_FRAMES):
            raise InvalidRequest(f"{where}: a video is a list of frames, or {_FRAMES}<frame>,<frame>", "messages")
        frames: Any = [f"data:image/jpeg;base64,{frame}" for frame in url.removeprefix(_FRAMES).split(",")]
    else:
        frames = part["video"]
    if not isinstance(frames, list) or not all(isinstance(frame, str) for frame in frames):
        raise InvalidRequest(f"{where}: a video is a list of the URLs of its frames", "messages")
    inner = part[kind] if isinstance(part[kind], dict) else {}
    given = (part.get("fps"), inner.get("fps"))
    fps = next((one for one in given if one is not None), FRAMES_PER_SECOND)
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0.001 <= fps <= 1000:
        raise InvalidRequest(f"{where}.fps: frames a second, from 0.001 to 1000", "messages")
    return {"type": "video", "video": frames, "fps": float(fps)}


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list", "messages")
    return [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} must be an object with a function and its name", "messages")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(given: Any) -> Any:
    """Parse call arguments into an object; text that is not JSON or is nested too deep stays text.

    A model's answer may have been cut within its arguments, and clients send our answers back to us.
    """
    if given is None:
        return {}
    if not isinstance(given, str):
        return given
    try:
        arguments = decode_json(given or "{}")
        check_depth(arguments, "messages")
    except (msgspec.DecodeError, RecursionError, InvalidRequest):
        return given
    return arguments
