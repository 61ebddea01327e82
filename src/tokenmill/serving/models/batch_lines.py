"""Answer the lines of batches by the servers of the models that they name, which are loaded for them.

A line never takes a model's memory from requests that run: it loads none while one does, and is asked again later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import msgspec

from tokenmill.core.errors import TokenMillError
from tokenmill.core.json_text import decode_json
from tokenmill.serving.batches.lines import BatchLine, line_body
from tokenmill.serving.batches.runner import Reply
from tokenmill.serving.models.asked import choose
from tokenmill.serving.models.catalogue import Entry
from tokenmill.serving.models.errors import ModelDied, ModelFailed
from tokenmill.serving.models.records import Ticket
from tokenmill.serving.models.service import ModelService
from tokenmill.serving.models.states import SERVING
from tokenmill.serving.server.http.errors import error_response
from tokenmill.serving.server.http.middleware import BATCH_HEADER, owner_of_key

# Says nothing about the line itself: it is answered later.
_LATER = Reply(httpx.codes.SERVICE_UNAVAILABLE, b"")


class _Body(msgspec.Struct):
    model: Any = None


class ModelLines:
    """Answers lines with what the models' servers say; a model that cannot be loaded fails them (502)."""

    def __init__(self, service: ModelService, key_models: Mapping[str, frozenset[str]]) -> None:
        """`key_models`: names of the models that an owner may use, where not all."""
        self._service = service
        self._key_models = key_models
        self._tickets: set[Ticket] = set()

    @property
    def is_busy(self) -> bool:
        """True while a request that is no line waits for its model."""
        return any(not self._tickets.issuperset(model.waiting) for model in self._service.keeper.models.values())

    @property
    def _is_in_use(self) -> bool:
        return any(not self._tickets.issuperset(model.using) for model in self._service.keeper.models.values())

    def of(self, owner: Callable[[str], Awaitable[str]]) -> Callable[[str, str, str, bytes], Awaitable[Reply]]:
        """Return what answers a line; `owner` returns the owner of a batch."""

        async def answer(endpoint: str, batch_id: str, request_id: str, line: bytes) -> Reply:
            try:
                whose = await owner(batch_id)
                entry, body = self._entry(whose, line), line_body(line, batch_id)
                key = next((key for key in entry.keys if owner_of_key(key) == whose), None)
                headers = {"x-request-id": request_id, BATCH_HEADER: batch_id, "content-type": "application/json"}
                headers |= {} if key is None else {"authorization": f"Bearer {key}"}
                return await self._ask(entry, endpoint, body, headers)
            except ModelFailed as error:
                return _reply(ModelDied(str(error)))
            except TokenMillError as error:
                return _reply(error)

        return answer

    def _entry(self, owner: str, line: bytes) -> Entry:
        """Return the model of a line; raise as `choose` does."""
        name = decode_json(line, BatchLine[_Body]).body.model
        seen = self._service.catalogue.only(self._key_models.get(owner))
        return choose(seen, name if isinstance(name, str) else None, None)

    async def _ask(self, entry: Entry, endpoint: str, body: bytes, headers: dict[str, str]) -> Reply:
        if self._service.record(entry.name).state not in SERVING and self._is_in_use:
            return _LATER
        claim = self._service.claim(entry, is_asked=False)
        self._tickets.add(claim.ticket)
        try:
            server = await claim.admitted()
            try:
                reply = await server.http.post(endpoint, content=body, headers=headers)
            except (httpx.HTTPError, RuntimeError):  # it has died, and its client may be closed already
                claim.leave()
                await server.lost()
                return _LATER
            return Reply(reply.status_code, reply.content)
        finally:
            claim.leave()
            self._tickets.discard(claim.ticket)


def _reply(error: TokenMillError) -> Reply:
    response = error_response(error)
    return Reply(response.status_code, bytes(response.body))
