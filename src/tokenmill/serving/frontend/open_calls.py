"""`OpenCalls`: the open calls at all API processes of a server, for its operator."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.serving.frontend.client import EngineClient
from tokenmill.serving.replicas.siblings.siblings import Siblings


class OpenCalls:
    """The open calls of this process and, if there are any, of its siblings."""

    def __init__(self, client: EngineClient, siblings: Siblings | None = None) -> None:
        self._client = client
        self._siblings = siblings

    @property
    def num_open(self) -> int:
        """Number of requests without a terminal output; siblings' numbers are up to a second old."""
        return self._client.num_open + (0 if self._siblings is None else self._siblings.num_open)

    async def find(self, names: Sequence[str], owner: str) -> dict[str, list[list[str]]]:
        """Find this owner's open requests by name, grouped by call; see `EngineClient.find`."""
        found = self._client.find(names, owner)
        for name, ids in [] if self._siblings is None else await self._siblings.find(names, owner):
            found[name].append(ids)
        return found

    def abort(self, ids: Sequence[str]) -> None:
        """End those of these requests that are open."""
        self._client.abort(ids)
        if self._siblings is not None:
            self._siblings.abort(ids)

    async def abort_all(self) -> int:
        """End every open request; return how many there were."""
        ids = self._client.open_ids
        for _, others in [] if self._siblings is None else await self._siblings.find([]):
            ids += others
        self.abort(ids)
        return len(ids)
