"""Complete /openapi.json beyond the list of routes: bodies, parameters of paths, and the form of errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tokenmill.serving.server.http.errors import ErrorBody

_REFERENCE = "#/components/schemas/{name}"
# Routes that answer with something else than JSON, and those that also stream.
_PLAIN = {
    "/live": "text/event-stream",
    "/metrics": "text/plain",
    "/v1/files/{file_id}/content": "application/octet-stream",
}
_EMPTY = ("/health", "/health_generate", "/ping")
_STREAMED = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate"),
    "/v1/sessions/{session_id}/input",
    "/v1/audio/transcriptions",
)


def complete(document: dict[str, Any], bodies: Sequence[type[msgspec.Struct]], refused: Iterable[str]) -> None:
    """Complete an application's document, without the fields that exist only to be `refused` by name."""
    _, schemas = msgspec.json.schema_components([*bodies, ErrorBody], ref_template=_REFERENCE)
    for schema in schemas.values():
        for name in refused:
            schema.get("properties", {}).pop(name, None)
    document["components"] = {
        "schemas": schemas,
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    document["security"] = [{"key": []}, {}]
    for path, operation in _operations(document):
        operation["parameters"] = [*_path_parameters(path), *operation.get("parameters", [])]
        operation["responses"] = {"200": _success(path), "4XX": _failure(), "5XX": _failure()}


def body_of(bodies: Sequence[type[msgspec.Struct]], kind: str) -> dict[str, Any]:
    """Return the part of an operation that names its body, one of these, of this media type."""
    references = [{"$ref": _REFERENCE.format(name=body.__name__)} for body in bodies]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {kind: {"schema": schema}}}}


def query_of(query: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the part of an operation that names the parameters of its query string."""
    _, schemas = msgspec.json.schema_components([query])
    fields = schemas[query.__name__]["properties"]
    return {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in fields.items()]}


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((path, operation) for path, methods in document["paths"].items() for operation in methods.values())


def _path_parameters(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"\{(\w+)\}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _success(path: str) -> dict[str, Any]:
    if path in _EMPTY:
        return {"description": "Yes"}
    content: dict[str, Any] = {_PLAIN.get(path, "application/json"): {"schema": {}}}
    if path in _STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": "The answer", "content": content}


def _failure() -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(name=ErrorBody.__name__)}
    return {"description": "What is wrong", "content": {"application/json": {"schema": schema}}}
