"""Write every error body that the server sends, in OpenAI's form. No body carries a path or a traceback."""

from __future__ import annotations

import logging
import re

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest, QueueFull, TokenMillError, Unavailable, WrongTask

_logger = logging.getLogger(__name__)

CLIENT_GONE = 499
ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api/"
TEI_PATHS = ("/embed", "/predict")


class ModelNotFound(InvalidRequest):
    """The request names a model that this server does not have."""

    status = 404
    code = "model_not_found"


class Unauthorized(TokenMillError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(TokenMillError):
    """The request comes from a page or by a name that is not allowed."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class UnsupportedMediaType(InvalidRequest):
    """The body has a type that the server does not read."""

    status = 415


class HeadersTooLarge(InvalidRequest):
    """The headers are larger than the server accepts."""

    status = 431


class RequestTimedOut(TokenMillError):
    """The request's own `timeout` has passed, or its client took too long to send it."""

    status = 408
    type = "timeout_error"


class ServerStopping(TokenMillError):
    """The server ended before the request did."""

    status = 503
    type = "server_stopping"


class ServerBusy(Unavailable):
    """The server cannot take in this request now."""


class ErrorInfo(msgspec.Struct):
    """The `error` object of OpenAI's error bodies."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """OpenAI's error body."""

    error: ErrorInfo


def error_body(error: Exception) -> ErrorBody:
    """Return what a client may know of an error; only our own errors carry sentences meant for clients."""
    if not isinstance(error, TokenMillError):
        return ErrorBody(ErrorInfo("internal error", TokenMillError.type, None, None))
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return ErrorBody(ErrorInfo(without_folders(str(error)), error.type, param, code))


# An absolute path of two parts or more, but neither a part of an address nor a route; a name in backticks is the API's.
_PATH = re.compile(r"""(?<![\w.:/`~-])~?/(?!v1/)(?:[^\s/:;,'"`()]+/)+([^\s/:;,'"`()]*)""")


def without_folders(text: str) -> str:
    """Return a text in which files of this machine appear by their names only, without their folders.

    Sentences of all packages come here, and those of the engines tell the operator where a file lies.
    """
    return _PATH.sub(r"\1", text)


class AnthropicError(msgspec.Struct):
    """The `error` object of Anthropic's error bodies."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct):
    """Anthropic's error body."""

    error: AnthropicError
    type: str = "error"


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_body(error: Exception) -> AnthropicErrorBody:
    """Return an error's body in Anthropic's form."""
    kind = _ANTHROPIC_TYPES.get(error_status(error), "api_error")
    return AnthropicErrorBody(AnthropicError(kind, error_body(error).error.message))


def ollama_body(error: Exception) -> dict[str, str]:
    """Return an error's body in Ollama's form."""
    return {"error": error_body(error).error.message}


_TEI_TYPES = {413: "validation", 422: "validation", 424: "backend", 429: "overloaded", 503: "unhealthy"}


def tei_body(error: Exception, path: str) -> dict[str, str]:
    """Return an error's body in the form of text-embeddings-inference."""
    status = error_status(error, path)
    kind = _TEI_TYPES.get(status, "validation" if status < 500 else "backend")
    return {"error": error_body(error).error.message, "error_type": kind}


def _body(error: Exception, path: str) -> ErrorBody | AnthropicErrorBody | dict[str, str]:
    """Return an error's body in the form of the API that a path belongs to."""
    if path.startswith(OLLAMA_PATH):
        return ollama_body(error)
    if path.endswith(TEI_PATHS):
        return tei_body(error, path)
    return anthropic_body(error) if path.startswith(ANTHROPIC_PATH) else error_body(error)


def error_status(error: Exception, path: str = "") -> int:
    """Return the HTTP status of an error, as clients of the API that its path belongs to know it."""
    if path.endswith(TEI_PATHS) and not path.startswith(OLLAMA_PATH):
        if isinstance(error, WrongTask):
            return 424
        if isinstance(error, InvalidRequest) and error.status == InvalidRequest.status:
            return 422
    return error.status if isinstance(error, TokenMillError) else TokenMillError.status


def error_response(error: Exception, path: str = "") -> Response:
    """Return the whole response to a failed request, in the form of the API that its path belongs to."""
    headers = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, QueueFull | Unavailable):
        headers["Retry-After"] = str(error.retry_after)
    return Response(
        msgspec.json.encode(_body(error, path)), error_status(error, path), headers, media_type="application/json"
    )


async def handle_error(request: Request, error: Exception) -> Response:
    """Answer an exception that a route raised."""
    if not isinstance(error, TokenMillError):
        _logger.error("a request failed", exc_info=error)
    return error_response(error, request.scope["path"])


async def handle_disconnect(_request: Request, _error: Exception) -> Response:
    """Return an empty reply for a client that left while it sent its body."""
    return Response(status_code=CLIENT_GONE)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """Answer requests that the router refuses: unknown routes (404) and methods (405)."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.scope['path'][:200]}"
    body = ErrorBody(ErrorInfo(message, InvalidRequest.type, None, None))
    return Response(msgspec.json.encode(body), error.status_code, error.headers, media_type="application/json")
