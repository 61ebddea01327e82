"""Read from a call's headers which engine its requests go to: a given one, or the one that has their session.

`x-data-parallel-rank` is vLLM's name, an engine's index; `x-session-id` is any label of the client's own, or the id of
an open session (`SessionReply`). Without one, the field `prompt_cache_key` of OpenAI's APIs names the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.http.middleware import owner_of, tenant_of
from tokenmill.serving.server.http.request_id import MEANING, is_request_id
from tokenmill.serving.server.session_store import is_session_id

RANK, SESSION = "x-data-parallel-rank", "x-session-id"


def placed(
    prompts: Sequence[GenerateText], context: ServerContext, scope: Scope, call: GenerationCall
) -> Sequence[GenerateText]:
    """Return the prompts of a call with the engine and session of its headers, or its key, and with its conversation.

    Raises:
        InvalidRequest: there is no such engine, or the session's name is not a label.
    """
    headers = Headers(scope=scope)
    rank, named = headers.get(RANK), headers.get(SESSION, "")
    if named and not is_request_id(named):
        raise InvalidRequest(f"{SESSION} must be {MEANING}", SESSION)
    if is_session_id(named) and named != call.session_key:
        raise InvalidRequest(
            f"{SESSION}: this route takes no turns of sessions; /v1/sessions/{named}/input does", SESSION
        )
    session = named or call.session_key
    conversation = _conversation(named or call.conversation or "", call, scope)
    if rank is None and not session and not conversation:
        return prompts
    changes: dict[str, Any] = {"engine": _engine(rank, context), "session": _session(session, scope)}
    return [msgspec.structs.replace(prompt, **changes, conversation=conversation) for prompt in prompts]


def _conversation(label: str, call: GenerationCall, scope: Scope) -> str:
    """Return the name under which prompts are compared: of one key, and never of two that share no cache."""
    owner = owner_of(scope)
    if call.messages is None or not (label or owner):
        return ""
    parts = (owner, call.cache_salt or "", call.model or "", label)
    return blake2b("\0".join(parts).encode(errors="replace"), digest_size=12).hexdigest()


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
