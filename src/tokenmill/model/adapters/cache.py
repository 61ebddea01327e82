"""The adapters of an engine in memory: read off its loop, shared by requests, forgotten by least recent use.

The cache is a gate of the engine (`engine/loop/gates.py`): a request waits at it until its adapter is there. Room is
limited; while all of it is in use, requests get in one after the other, even those whose adapter is there, so that each
waits no longer than the requests before it take.

One thread (the engine's) calls everything but `find`, which the runner's thread calls too.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenmill.core.adapters import AdapterRef, check_adapter_name
from tokenmill.core.errors import InvalidCheckpoint, InvalidRequest
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import RequestStatus
from tokenmill.model.adapters.packing import AdapterReader, PackedAdapter

if TYPE_CHECKING:
    from tokenmill.model.adapters.slot_memory import SlotMemory  # which needs Triton


@dataclass(slots=True)
class _Entry:
    """An adapter in memory, and the requests that use it."""

    adapter: PackedAdapter
    users: set[str] = field(default_factory=set)


class AdapterCache:
    """Reads adapters, and keeps them.

    Args:
        max_count: adapters in memory.

    Attributes:
        slots: device memory that steps read; None: steps read the adapters kept here.
    """

    status = RequestStatus.WAITING_FOR_ADAPTER

    def __init__(self, reader: AdapterReader, max_count: int, slots: SlotMemory | None = None) -> None:
        self.slots = slots
        self._reader = reader
        self._max_count = max_count
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._waiting: OrderedDict[str, AdapterRef] = OrderedDict()  # by request, in order of arrival
        self._loading: dict[str, Future[PackedAdapter]] = {}
        self._used_by: dict[str, AdapterRef] = {}  # by request
        self._news: dict[str, InvalidRequest | None] = {}  # of requests that wait no longer, until they are told
        self._pool: ThreadPoolExecutor | None = None

    @property
    def num_loaded(self) -> int:
        """Adapters in memory."""
        return len(self._entries)

    def look_at(self, name: str, path: str) -> AdapterRef:
        """Read an adapter, so that it can be named by its content; keep it if there is room.

        Raises:
            InvalidRequest: the name cannot be one.
            InvalidCheckpoint: the files cannot be served, and why.
        """
        check_adapter_name(name)
        adapter = self._reader.read(path)
        if adapter.digest not in self._entries and adapter.digest not in self._loading and self._make_room():
            self._entries[adapter.digest] = _Entry(adapter)
        return AdapterRef(name, path, adapter.digest, adapter.rank)

    def admit(self, message: AddRequest) -> bool:
        """Return True if the request needs no adapter, or one that is there while no request waits for room.

        Raises:
            InvalidRequest: this engine has no adapters.
        """
        if message.adapter is None:
            return True
        self._waiting[message.id] = message.adapter
        self._advance()
        return message.id in self._news and self._news.pop(message.id) is None

    def collect(self, timeout: float) -> dict[str, InvalidRequest | None]:
        """Return the requests whose adapter has been read or refused since the last call."""
        if timeout and self._loading:
            wait(list(self._loading.values()), timeout, return_when="FIRST_COMPLETED")
        for digest in [digest for digest, future in self._loading.items() if future.done()]:
            self._settle(digest, self._loading.pop(digest))
        self._advance()
        news, self._news = self._news, {}
        return news

    def release(self, request_id: str) -> None:
        """Forget a request and its use of an adapter."""
        self._waiting.pop(request_id, None)
        self._news.pop(request_id, None)
        ref = self._used_by.pop(request_id, None)
        if ref is not None:
            self._entries[ref.digest].users.discard(request_id)

    def name_of(self, request_id: str) -> str | None:
        """Return the name of a request's adapter; None: it has none."""
        ref = self._used_by.get(request_id) or self._waiting.get(request_id)
        return None if ref is None else ref.name

    def find(self, digest: str) -> PackedAdapter:
        """Return the adapter of a living request."""
        return self._entries[digest].adapter

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _advance(self) -> None:
        """Admit waiting requests whose adapter is there, in order; begin to read what the first of the others need."""
        for request_id, ref in list(self._waiting.items()):
            entry = self._entries.get(ref.digest)
            if entry is not None:
                entry.users.add(request_id)
                self._entries.move_to_end(ref.digest)
                self._used_by[request_id] = ref
                self._news[request_id] = None
                del self._waiting[request_id]
            elif ref.digest not in self._loading:
                if not self._make_room():
                    return
                self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="adapter")
                self._loading[ref.digest] = self._pool.submit(self._reader.read, ref.path)

    def _make_room(self) -> bool:
        """Make room for one more adapter; return False while all are in use."""
        if len(self._entries) + len(self._loading) < self._max_count:
            return True
        unused = next((digest for digest, entry in self._entries.items() if not entry.users), None)
        if unused is None:
            return False
        del self._entries[unused]
        return True

    def _settle(self, digest: str, future: Future[PackedAdapter]) -> None:
        error = future.exception()
        if error is None and future.result().digest == digest:
            self._entries[digest] = _Entry(future.result())
            return
        for request_id, ref in list(self._waiting.items()):
            if ref.digest == digest:
                self._news[request_id] = _refusal(ref.name, error)
                del self._waiting[request_id]


def _refusal(name: str, error: BaseException | None) -> InvalidRequest:
    if error is None:
        return InvalidRequest(f"the files of the adapter {name} have changed: load it again", "model")
    why = str(error) if isinstance(error, InvalidCheckpoint) else type(error).__name__
    return InvalidRequest(f"the adapter {name} could not be loaded: {why}", "model")
