"""Connect an engine to its sources of KV: turn their answers into events, and give every wait a deadline.

    iteration of the engine   collect (what has ended) -> look_up (what is found) -> schedule -> launch: begin_transfers
    source's threads          fill, read, finish ──> collect, in the next iteration

Only this side of the room has a clock. A lookup that is not answered in time finds nothing; a late load ends with the
pages that have come; pages that are kept for too long are released. A transfer that has ended touches no page.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.request import CacheKey, FinishReason, TokenArray
from tokenmill.core.transfers import (
    Found,
    KVQuery,
    Loaded,
    LoadOrder,
    PlanTransfers,
    Released,
    SaveOrder,
    TransferEvent,
)
from tokenmill.engine.transfer.orders import Movers, PageLoad, PageSave
from tokenmill.engine.transfer.protocol import Answer, KeptPages, KVSource
from tokenmill.engine.transfer.state import TransferState

logger = logging.getLogger(__name__)

RECOMPUTE, FAIL = FAILURE_POLICIES = ("recompute", "fail")


class TransferTimeouts(msgspec.Struct, frozen=True):
    """Time limits of what sources do, in seconds.

    Attributes:
        lookup: for the answer to a question.
        load: for a load.
        save: for a save.
        keep: for keeping the pages of a request that has ended.
        close: for saving the rest when the engine ends.
    """

    lookup: float = 5.0
    load: float = 60.0
    save: float = 60.0
    keep: float = 60.0
    close: float = 10.0


@dataclass(slots=True)
class _Question:
    query: KVQuery
    params: dict[str, Any] | None
    answers: list[Answer | None]
    deadline: float


class KVConnector:
    """Passes lookups, orders and events between the scheduler's side and the sources.

    The engine's thread calls it; the threads of sources come in through `PageLoad` and `PageSave` only.

    Args:
        sources: asked in this order; the first that has more than the engine is loaded from.
        state: the scheduler's side.
        policy: for a request whose load fails: `recompute` what is missing, or `fail` the request.
    """

    def __init__(
        self,
        sources: Sequence[KVSource],
        state: TransferState,
        movers: Movers,
        policy: str = RECOMPUTE,
        timeouts: TransferTimeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sources = tuple(sources)
        self.timeouts = timeouts or TransferTimeouts()
        self._state = state
        self.movers = movers
        self._policy = policy
        self._clock = clock
        self._questions: dict[str, _Question] = {}
        self._loads: dict[int, tuple[PageLoad, float]] = {}
        self._saves: dict[int, tuple[list[PageSave], float]] = {}
        self._kept: dict[int, tuple[KVSource, float]] = {}
        self._params: dict[str, dict[str, Any]] = {}
        self._known: dict[str, list[KVSource]] = {}
        self._over: deque[int] = deque()  # ids of loads and saves, filled by any thread
        self._happened = threading.Event()
        self._failed: list[str] = []

    # --- requests come and go ---------------------------------------------------------------------------------------

    def arrived(self, message: AddRequest) -> None:
        """Tell the sources of a request that has come with `kv_transfer_params`.

        Raises:
            InvalidRequest: a source refuses its `kv_transfer_params`.
        """
        if message.kv_transfer_params is None:
            return
        known = self._known[message.id] = []
        try:
            for source in self.sources:
                source.arrived(message.id, message.kv_transfer_params)
                known.append(source)
        except InvalidRequest:
            self.forget_requests([message.id])
            raise
        self._params[message.id] = message.kv_transfer_params

    def ended(self, outputs: Iterable[TokenOutput]) -> None:
        """Forget the requests that these outputs end; replies of requests whose pages are kept say so."""
        for output in outputs:
            if output.finish_reason is None:
                continue
            pin_id = self._state.kept.get(output.id)
            if pin_id is not None and pin_id not in self._kept:
                output.kv_transfer_params = self._keep(pin_id, output)
            self.forget_requests([output.id])

    def _keep(self, pin_id: int, output: TokenOutput) -> dict[str, Any] | None:
        pin = self._state.pins[pin_id]
        source = next(source for source in self.sources if source.name == pin.kept_for)
        self._kept[pin_id] = source, self._clock() + self.timeouts.keep
        reason = output.finish_reason or FinishReason.STOP
        pages, params = pin.pages.tolist(), self._params.get(output.id)
        kept = KeptPages(pin_id, output.id, pin.cache_key, pin.tokens, pages, reason, params, pin.windows, pin.states)
        return source.ended(kept)

    def begun(self, request_ids: Iterable[str]) -> None:
        """Let the sources forget requests that take their rows. Their parameters stay until they end."""
        for request_id in request_ids:
            for source in self._known.pop(request_id, ()):
                source.forget(request_id)

    def forget_requests(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        request_ids = list(request_ids)
        self.begun(request_ids)
        for request_id in request_ids:
            self._questions.pop(request_id, None)
            self._params.pop(request_id, None)

    # --- questions --------------------------------------------------------------------------------------------------

    def look_up(self, queries: Iterable[KVQuery]) -> list[Found]:
        """Ask the sources, and return the answers that are complete at once."""
        deadline = self._clock() + self.timeouts.lookup
        for query in queries:
            params = self._params.get(query.request_id)
            self._known[query.request_id] = list(self.sources)
            self._questions[query.request_id] = _Question(query, params, [None] * len(self.sources), deadline)
        return [found for question in list(self._questions.values()) if (found := self._answer(question)) is not None]

    def _answer(self, question: _Question) -> Found | None:
        """Ask the sources that have not answered yet; return the answer once all have, or once the time is up."""
        for number, source in enumerate(self.sources):
            if question.answers[number] is None:
                question.answers[number] = _look_up(source, question)
        if None in question.answers and self._clock() < question.deadline:
            return None
        del self._questions[question.query.request_id]
        found = Found(question.query.request_id)
        for source, answer in zip(self.sources, question.answers, strict=True):
            if answer is None:
                continue
            kept_for = source.name if answer.keeps and not found.kept_for else found.kept_for
            is_first = not found.source and answer.num_tokens > question.query.num_local_tokens
            if is_first:
                found = Found(found.request_id, source.name, answer.num_tokens, answer.where, kept_for)
            else:
                found = msgspec.structs.replace(found, kept_for=kept_for)
        return found

    # --- orders -----------------------------------------------------------------------------------------------------

    def begin_transfers(self, transfers: PlanTransfers) -> None:
        """Hand the orders of a plan to the sources."""
        now = self._clock()
        for load in transfers.loads:
            self._begin_load(load, now + self.timeouts.load)
        for save in transfers.saves:
            pin = self._state.pins[save.id]
            self._begin_save(save, pin.cache_key, pin.tokens, now + self.timeouts.save)

    def _begin_load(self, order: LoadOrder, deadline: float) -> None:
        request = self._state.loads[order.id].request
        end = (order.first_page + len(order.page_ids)) * self._state.page_size
        source = next(source for source in self.sources if source.name == order.source)
        load = PageLoad(order, request.cache_key, request.token_ids[:end].copy(), self.movers, self._teller(order.id))
        self._loads[order.id] = load, deadline
        _fetch(source, load)

    def _begin_save(self, order: SaveOrder, cache_key: CacheKey, tokens: TokenArray, deadline: float) -> None:
        stores = [source for source in self.sources if order.source in (source.name, "" if source.stores else None)]
        saves = [PageSave(order, cache_key, tokens, self.movers, self._teller(order.id)) for _ in stores]
        self._saves[order.id] = saves, deadline
        for source, save in zip(stores, saves, strict=True):
            _offer(source, save)

    def _teller(self, order_id: int) -> Callable[[], None]:
        def tell() -> None:
            self._over.append(order_id)
            self._happened.set()

        return tell

    # --- events -----------------------------------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """True while a question, a load, a save or kept pages are open that a request may wait for."""
        return bool(self._questions or self._loads or self._saves or self._kept)

    def wait(self, timeout: float) -> None:
        """Wait until a load or a save is over, for at most `timeout` seconds."""
        self._happened.wait(timeout)

    def collect(self) -> list[TransferEvent]:
        """Return the events since the last call: transfers that ended by themselves or because their time is up."""
        self._happened.clear()
        released = [(source, list(source.poll())) for source in self.sources]
        events: list[TransferEvent] = []
        while self._over:
            events += self._settle(self._over.popleft())
        for source, ids in released:
            events += [Released(pin_id) for pin_id in ids if self._kept.get(pin_id, (None,))[0] is source]
        for item in events:
            if isinstance(item, Released):
                self._kept.pop(item.id, None)
        return events + self._late()

    def _settle(self, order_id: int) -> list[TransferEvent]:
        if order_id in self._loads:
            return [self._end_load(order_id, may_fail=True)]
        saves, _ = self._saves.get(order_id, ([], 0.0))
        if not saves or not all(save.is_over for save in saves):
            return []
        del self._saves[order_id]
        return [Released(order_id, all(save.is_saved for save in saves))]

    def _end_load(self, order_id: int, may_fail: bool) -> Loaded:
        load, _ = self._loads.pop(order_id)
        load.cancel()
        num_filled = load.num_filled
        if may_fail and self._policy == FAIL and num_filled < len(load.order.page_ids):
            self._failed.append(load.order.request_id)
        return Loaded(order_id, (load.order.first_page + num_filled) * self._state.page_size, load.has_state)

    def _late(self) -> list[TransferEvent]:
        """End loads, saves and kept pages that take too long."""
        now = self._clock()
        late = [order_id for order_id, (_, deadline) in self._loads.items() if deadline <= now]
        late += [order_id for order_id, (_, deadline) in self._saves.items() if deadline <= now]
        late += [order_id for order_id, (_, deadline) in self._kept.items() if deadline <= now]
        for order_id in late:
            logger.warning("KV transfer %d is cancelled: it took too long", order_id)
        return self.cancel(late, may_fail=True)

    def cancel(self, order_ids: Iterable[int], may_fail: bool = False) -> list[TransferEvent]:
        """End these at once. Their pages are not touched any more when it returns.

        Args:
            may_fail: a load that is not complete counts as failed.
        """
        events: list[TransferEvent] = []
        for order_id in order_ids:
            if order_id in self._loads:
                events.append(self._end_load(order_id, may_fail))
            elif order_id in self._saves:
                saves, _ = self._saves.pop(order_id)
                for save in saves:
                    save.cancel()
                events.append(Released(order_id, all(save.is_saved for save in saves)))
            elif order_id in self._kept:
                source, _ = self._kept.pop(order_id)
                source.expired(order_id)
                events.append(Released(order_id))
        return events

    def cancel_loads(self, request_ids: Iterable[str]) -> list[TransferEvent]:
        """End the loads of requests that are about to be aborted."""
        ids = set(request_ids)
        return self.cancel([i for i, (load, _) in self._loads.items() if load.order.request_id in ids])

    def reset(self, everything: bool) -> list[TransferEvent]:
        """End the saves, or everything, before the prefix cache is forgotten.

        Args:
            everything: end loads and kept pages too; else these prevent the reset, as running requests do.
        """
        return self.cancel([*self._saves, *(self._loads if everything else ()), *(self._kept if everything else ())])

    def forget_stored(self) -> None:
        """Let every source forget what it has stored."""
        for source in self.sources:
            source.reset()

    def take_failed(self) -> list[tuple[str, str]]:
        """Return the requests that must end because their load has failed, and what to tell them."""
        failed, self._failed = self._failed, []
        return [(request_id, "the KV of its prompt could not be loaded") for request_id in failed]

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all loads, give the sources some time to store unsaved pages, and close them."""
        self.cancel(list(self._loads))
        self.store_rest()
        self.cancel(list(self._kept))
        for source in self.sources:
            source.close()

    def store_rest(self) -> list[TransferEvent]:
        """Store all that is unsaved, as far as there is time for it; no save is left open. Return the events."""
        if not any(source.stores for source in self.sources):
            return []
        deadline = self._clock() + self.timeouts.close
        self._state.save_rest()
        if (orders := self._state.take_orders()) is not None:
            self.begin_transfers(PlanTransfers([], orders.saves))
        events: list[TransferEvent] = []
        while self._saves and self._clock() < deadline:
            events += self.collect()
            if self._saves:
                self.wait(0.05)
        return events + self.cancel(list(self._saves))


# The barriers between an engine and sources that may not be ours: what fails there finds, loads or stores nothing.


def _look_up(source: KVSource, question: _Question) -> Answer | None:
    try:
        return source.lookup(question.query, question.params)
    except Exception:
        logger.exception("the KV source %s failed to look up a prompt", source.name)
        return Answer()


def _fetch(source: KVSource, load: PageLoad) -> None:
    try:
        source.load(load)
    except Exception:
        logger.exception("the KV source %s failed to load", source.name)
        load.finish()


def _offer(source: KVSource, save: PageSave) -> None:
    try:
        source.save(save)
    except Exception:
        logger.exception("the KV source %s failed to take pages", source.name)
        save.finish(is_saved=False)
