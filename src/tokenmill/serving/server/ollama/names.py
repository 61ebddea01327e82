"""Models by Ollama's names, `name:tag`: the tag `latest` may be left out, here as there."""

from __future__ import annotations

from tokenmill.core.errors import InvalidRequest
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.http.errors import ModelNotFound

LATEST = ":latest"


def tagged(name: str) -> str:
    """Return a name with its tag."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def known_names(context: ServerContext) -> list[str]:
    """Return the names of the model and the adapters, as the API has them."""
    return [*context.names, *(adapter.name for adapter in context.adapters)]


def find_model(context: ServerContext, name: str | None) -> str:
    """Return the name, as the API has it, of the model or adapter that a request names.

    Raises:
        InvalidRequest: it names none.
        ModelNotFound: this server does not have it.
    """
    if not name:
        raise InvalidRequest("model is required", "model")
    for known in known_names(context):
        if tagged(known) == tagged(name):
            return known
    raise ModelNotFound(f"model '{name[:200]}' not found; this server has '{tagged(context.model_name)}'", "model")
