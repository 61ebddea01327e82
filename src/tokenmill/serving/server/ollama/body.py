"""Parse the bodies of /api/chat and /api/generate and turn them into calls."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.infill import Infill
from tokenmill.serving.frontend.chat_messages import check_depth
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.fields import Int32, Tools
from tokenmill.serving.server.ollama.options import check_keep_alive, params_of, structure, thinking

_ROLES = ("system", "user", "assistant", "tool", "developer")


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of both bodies."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    # Without effect: a prompt that is too long is refused, and a context never shifts.
    truncate: bool | None = None
    shift: bool | None = None


class OllamaChatBody(_Body, forbid_unknown_fields=True, kw_only=True):
    """The body of /api/chat."""

    messages: list[dict[str, Any]] | None = None
    tools: Tools | None = None

    @property
    def is_empty(self) -> bool:
        """True if nothing is asked but to load the model."""
        return not self.messages


class OllamaGenerateBody(_Body, forbid_unknown_fields=True, kw_only=True):
    """The body of /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    # Refused unless they ask for nothing.
    template: str | None = None
    context: list[int] | None = None

    @property
    def is_empty(self) -> bool:
        """True if nothing is asked but to load the model."""
        return not (self.prompt or self.images)


def chat_call(body: OllamaChatBody, name: str, context: ServerContext) -> GenerationCall:
    """Return the call that a chat asks for, of the model or adapter `name`.

    Raises:
        InvalidRequest: naming the message or the field at fault.
    """
    check_depth(body.messages, "messages")
    if body.tools and not (context.parsers.finds_calls and context.parsers.notation):
        raise InvalidRequest(f"'{context.model_name}' does not support tools", "tools")
    return GenerationCall(
        model=name,
        params=_params(body),
        messages=_messages(body.messages or []),
        tools=body.tools,
        template_kwargs=thinking(body.think, context),
        logprobs_field="top_logprobs",
        stream=body.stream is not False,
    )


def generate_call(body: OllamaGenerateBody, name: str, context: ServerContext) -> GenerationCall:
    """Return the call that a prompt asks for: a chat of one message, or as it is if it is `raw` or has a suffix.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    for field in ("template", "context"):
        if getattr(body, field):
            raise InvalidRequest(f"{field} is not supported by this server: send messages to /api/chat", field)
    call = GenerationCall(
        model=name, params=_params(body), logprobs_field="top_logprobs", stream=body.stream is not False
    )
    if body.raw or body.suffix:
        if body.images:
            raise InvalidRequest("images go with a prompt that is not raw and has no suffix", "images")
        prompt = Infill(body.prompt, body.suffix) if body.suffix else body.prompt
        return msgspec.structs.replace(call, prompts=[prompt])
    messages = [{"role": "user", "content": body.prompt, "images": body.images or []}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return msgspec.structs.replace(call, messages=_messages(messages), template_kwargs=thinking(body.think, context))


def _params(body: _Body) -> dict[str, Any]:
    check_keep_alive(body.keep_alive)
    params = params_of(body.options) | structure(body.format)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    return params | ({"logprobs": body.top_logprobs or 0} if body.logprobs else {})


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form; results of tools belong to the calls before them."""
    calls: list[tuple[str, str]] = []
    converted = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role, content = message.get("role"), message.get("content") or ""
        if role not in _ROLES:
            raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES[:4])}", "messages")
        if not isinstance(content, str):
            raise InvalidRequest(f"{where}.content must be a string", "messages")
        own: dict[str, Any] = {"role": role, "content": _content(content, message.get("images"), where)}
        if isinstance(message.get("thinking"), str) and message["thinking"]:
            own["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            own["tool_calls"] = _calls(message["tool_calls"], number, where)
            calls = [(call["id"], call["function"]["name"]) for call in own["tool_calls"]]
        if role == "tool":
            own |= _answered(message, calls)
        converted.append(own)
    return converted


def _content(text: str, images: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a message: its text, behind its images."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise InvalidRequest(f"{where}.images must be a list of images in base64", "messages")
    # The type is found in the bytes: the API does not tell it.
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images]
    return [*parts, {"type": "text", "text": text}]


def _calls(calls: Any, number: int, where: str) -> list[dict[str, Any]]:
    """Return the calls of a message, with an id each."""
    made = []
    for i, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise InvalidRequest(
                f'{where}.tool_calls[{i}] must be {{"function": {{"name": ..., "arguments": ...}}}}', "messages"
            )
        given, arguments = call.get("id"), function.get("arguments")
        id = given if isinstance(given, str) and given else f"call_{number}_{i}"
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
        made.append({"id": id, "type": "function", "function": {"name": name, "arguments": text}})
    return made


def _answered(message: dict[str, Any], calls: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the id and the name of the call that a tool's message answers, which is taken from `calls`."""
    id, name = message.get("tool_call_id"), message.get("tool_name") or message.get("name")
    fits = [call for call in calls if id == call[0]] or [call for call in calls if name == call[1]] or calls
    if fits:
        calls.remove(fits[0])
    found = fits[0] if fits else (id or "", name or "")
    return {"tool_call_id": str(id or found[0]), "name": str(name or found[1])}
