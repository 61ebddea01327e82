"""Read from a request which model it asks for, and how long that one should stay."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.requests import Request

from tokenmill.config.model_presets import parse_duration
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.serving.models.catalogue import Catalogue, Entry
from tokenmill.serving.server.http.body import decode_body, read_raw
from tokenmill.serving.server.http.body_budget import BodyBudget
from tokenmill.serving.server.http.browser_guard import MULTIPART
from tokenmill.serving.server.http.errors import OLLAMA_PATH

_FORM_MODEL = re.compile(rb'name="?model"?\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]{0,512})\r\n')


class Named(msgspec.Struct):
    """The fields of a body that concern the choice of a model; all others are the model's own affair."""

    model: Any = None
    name: Any = None  # Ollama's older word
    stream: Any = None
    keep_alive: Any = None
    ttl: Any = None
    messages: Any = None
    prompt: Any = None
    images: Any = None


class Asked(msgspec.Struct, frozen=True):
    """A request for a model.

    Attributes:
        body: as it came.
        keep_alive: seconds that the model stays afterwards; None: not said.
        is_stream: it asks for a stream of events.
        is_empty: it asks Ollama for nothing but that the model be loaded, or unloaded.
    """

    name: str | None
    body: bytes
    keep_alive: float | None = None
    is_stream: bool = False
    is_empty: bool = False


async def read_asked(request: Request, budget: BodyBudget) -> Asked:
    """Read the body of a request for a model.

    Raises:
        InvalidRequest, TooLarge, ServerBusy, ClientDisconnect: as `read_body`.
    """
    path = path_of(request)
    if request.headers.get("content-type", "").startswith(MULTIPART):
        name, body = await read_raw(request, budget, _name_in_form)
        return Asked(request.query_params.get("model") or name, body)
    named, body = await read_raw(request, budget, lambda raw: decode_body(raw, Named) if raw.strip() else Named())
    name = named.model if named.model is not None else named.name if path.startswith(OLLAMA_PATH) else None
    name = request.query_params.get("model") if name is None else name
    if name is not None and not isinstance(name, str):
        raise InvalidRequest("model must be a text", "model")
    is_ollama = path.startswith(OLLAMA_PATH)
    empty = {"/api/chat": not named.messages, "/api/generate": not (named.prompt or named.images)}
    return Asked(
        name or None,
        body,
        _keep_alive(named),
        named.stream is True and not is_ollama,
        empty.get(path, False),
    )


def path_of(request: Request) -> str:
    """Return the path of a request without the prefix of a proxy in front."""
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", "").rstrip("/"))


def choose(catalogue: Catalogue, name: str | None, last_used: str | None) -> Entry:
    """Return the model that a request asks for; without a name the default, or the one that was used last.

    Raises:
        ModelNotFound: there is no such model.
        InvalidRequest: it names none, and none has been used yet.
    """
    if name is not None:
        return catalogue.find(name)
    if (chosen := catalogue.default or last_used) is not None and chosen in catalogue:
        return catalogue[chosen]
    raise InvalidRequest(
        f"name a model: {', '.join(entry.name for entry in catalogue) or 'there are none yet'}", "model"
    )


def _name_in_form(raw: bytearray) -> str | None:
    found = _FORM_MODEL.search(raw)
    return found[1].decode("utf-8", "replace") if found else None


def _keep_alive(named: Named) -> float | None:
    """Return Ollama's `keep_alive`, else LM Studio's `ttl`, in seconds; None: neither is there.

    Raises:
        InvalidRequest: it is no duration.
    """
    for field in ("keep_alive", "ttl"):
        value = getattr(named, field)
        if value is not None and value != "":
            try:
                return parse_duration(value)
            except InvalidConfig as error:
                raise InvalidRequest(f"{field}: {error}", field) from None
    return None
