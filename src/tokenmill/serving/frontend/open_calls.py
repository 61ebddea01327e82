"""`OpenCalls`: the open calls at all API processes of a server, for its operator."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.core.api_messages import PrefixNote
from tokenmill.serving.frontend.client import EngineClient
from tokenmill.serving.replicas.api_workers.api_workers import ApiWorkers


class OpenCalls:
    """The open calls of this process and, if there are any, of the API workers."""

    def __init__(self, client: EngineClient, api_workers: ApiWorkers | None = None) -> None:
        self._client = client
        self._api_workers = api_workers

    @property
    def num_open(self) -> int:
        """Number of requests without a terminal output; the API workers' numbers are up to a second old."""
        return self._client.num_open + (0 if self._api_workers is None else self._api_workers.num_open)

    async def find(self, names: Sequence[str], owner: str) -> dict[str, list[list[str]]]:
        """Find this owner's open requests by name, grouped by call; see `EngineClient.find`."""
        found = self._client.find(names, owner)
        for name, ids in [] if self._api_workers is None else await self._api_workers.find(names, owner):
            found[name].append(ids)
        return found

    async def notes(self, ids: Sequence[str], owner: str) -> dict[str, PrefixNote]:
        """Return what there is to say about the cached prefixes of this owner's open requests."""
        found = self._client.notes(ids)
        return found if self._api_workers is None else found | await self._api_workers.notes(ids, owner)

    def abort(self, ids: Sequence[str]) -> None:
        """End those of these requests that are open."""
        self._client.abort(ids)
        if self._api_workers is not None:
            self._api_workers.abort(ids)

    def answer_now(self, ids: Sequence[str]) -> None:
        """Let those of these requests that are open end their thinking."""
        self._client.answer_now(ids)
        if self._api_workers is not None:
            self._api_workers.answer_now(ids)

    async def abort_all(self) -> int:
        """End every open request; return how many there were."""
        ids = self._client.open_ids
        for _, others in [] if self._api_workers is None else await self._api_workers.find([]):
            ids += others
        self.abort(ids)
        return len(ids)
