"""Read from a call's headers which engine its requests go to: a given one, or the one that has their session.

`x-data-parallel-rank` is vLLM's name, an engine's index; `x-session-id` is any label of the client's own. Without one,
the field `prompt_cache_key` of OpenAI's APIs names the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.http.middleware import tenant_of
from tokenmill.serving.server.http.request_id import MEANING, is_request_id

RANK, SESSION = "x-data-parallel-rank", "x-session-id"


def placed(
    prompts: Sequence[GenerateText], context: ServerContext, scope: Scope, call: GenerationCall
) -> Sequence[GenerateText]:
    """Return the prompts of a call, set to the engine and the session that its headers name, or its key.

    Raises:
        InvalidRequest: there is no such engine, or the session's name is not a label.
    """
    headers = Headers(scope=scope)
    rank, session = headers.get(RANK), headers.get(SESSION, "")
    if session and not is_request_id(session):
        raise InvalidRequest(f"{SESSION} must be {MEANING}", SESSION)
    label = session or call.session_key
    if rank is None and not label:
        return prompts
    return [
        msgspec.structs.replace(prompt, engine=_engine(rank, context), session=_session(label, scope))
        for prompt in prompts
    ]


def _engine(rank: str | None, context: ServerContext) -> int | None:
    if rank is None:
        return None
    indices = {str(engine.index): engine.index for engine in context.engines}
    if rank not in indices:
        raise InvalidRequest(f"{RANK} must be the index of an engine, one of {', '.join(indices)}", RANK)
    return indices[rank]


def _session(label: str, scope: Scope) -> str:
    """Return the session's name: different for different tenants, and no longer than a hash."""
    name = f"{tenant_of(scope)}/{label}".encode("utf-8", "replace")
    return blake2b(name, digest_size=12).hexdigest() if label else ""
