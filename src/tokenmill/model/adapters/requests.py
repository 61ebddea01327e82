"""`AdapterRequests`: answer operators and clients who bring an adapter, between two steps of the engine."""

from __future__ import annotations

from tokenmill.core.adapters import AdapterRef
from tokenmill.core.engine_messages import AdapterSeen
from tokenmill.core.errors import InvalidCheckpoint, InvalidRequest
from tokenmill.core.extension import EngineExtension
from tokenmill.core.messages import EngineControl, LookAtAdapter
from tokenmill.model.adapters.cache import AdapterCache


class AdapterRequests(EngineExtension):
    """Names adapters by their content; requests wait for them at the gate, which is the cache itself."""

    def __init__(self, cache: AdapterCache) -> None:
        self._cache = cache

    def look_at(self, name: str, path: str) -> AdapterRef:
        """Read an adapter; see `AdapterCache.look_at`."""
        return self._cache.look_at(name, path)

    def answer(self, message: EngineControl) -> AdapterSeen | None:
        """Read the adapter that an operator names."""
        if not isinstance(message, LookAtAdapter):
            return None
        try:
            return AdapterSeen(message.id, self.look_at(message.name, message.path))
        except (InvalidCheckpoint, InvalidRequest) as error:
            return AdapterSeen(message.id, None, str(error))
