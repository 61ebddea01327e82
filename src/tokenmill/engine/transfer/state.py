"""`TransferState`: the scheduler's side of transfers, with all loads, saves and kept pages that are not over.

    WAITING ──asked──> WAITING_FOR_REMOTE_KV ──Found──> WAITING ──its turn, more is there than here──>
    WAITING_FOR_REMOTE_KV, pages held ──Loaded──> WAITING, what came is the prefix cache's ──its turn──> RUNNING

Pages that are saved or kept stand in the tree, locked there like a request's, until `Released`. Knows no source, no
thread and no clock: the same calls and the same events give the same orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from tokenmill.core.plan import StepPlan
from tokenmill.core.request import CacheKey, FinishReason, Request, RequestStatus, TokenArray
from tokenmill.core.transfers import (
    Export,
    Found,
    KVQuery,
    Loaded,
    LoadOrder,
    PlanTransfers,
    Released,
    SaveOrder,
    TransferEvent,
    TransferSettings,
)
from tokenmill.engine.kv.kv_manager import CachedPages, KVManager
from tokenmill.engine.kv.radix_node import PageArray, RadixNode
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.resources.resource import Resource
from tokenmill.engine.scheduler.resources.state_slots import StateSlots
from tokenmill.engine.scheduler.resources.transfers import Transfers
from tokenmill.engine.transfer.pins import Load, Pin, check_pins, pin_states
from tokenmill.engine.transfer.window_tables import WindowTables

# While this part of all pages is pinned for saving, no more is offered, but what sessions would lose else.
SAVING_SHARE = 1 / 4
_BY_ITSELF = frozenset({FinishReason.STOP, FinishReason.LENGTH})


@dataclass(slots=True)
class _Orders:
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)


class TransferState(Transfers):
    """Implements `Transfers` for the sources of an engine.

    Args:
        resources: of the scheduler. Recurrent states, if it has any, are saved with their pages, and a prefix is
            loaded up to one; so are pages of a window group.

    Attributes:
        loads: loads that are not over, by id.
        pins: saves and kept pages that are not over, by id.
        kept: ids of the pins of kept pages, by request.
        on_ended: called with each request that ends.
        page_size: tokens of a page.
    """

    def __init__(self, kv: KVManager, settings: TransferSettings, resources: Sequence[Resource] = ()) -> None:
        assert kv.shares_prefixes, "what is loaded is found in the prefix cache"
        self.loads: dict[int, Load] = {}
        self.pins: dict[int, Pin] = {}
        self.kept: dict[str, int] = {}
        self.on_ended: list[Callable[[Request], None]] = []
        self.num_saving_pages = 0
        self.num_loaded_tokens = 0
        self.num_stored_tokens = 0
        self._kv, self.page_size = kv, kv.page_size
        self._states = next((one for one in resources if isinstance(one, StateSlots)), None)
        self._windows = WindowTables.over(kv, resources)
        self._settings = settings
        self._queries: list[KVQuery] = []
        self._asked: dict[str, Request] = {}
        self._found: dict[str, Found] = {}
        self._orders = _Orders()
        self._num_new: dict[str, int] = {}
        self._is_saved = np.zeros(kv.pool.num_pages, dtype=bool)
        self._last_id = 0
        kv.on_cached.append(self._cached)

    @property
    def saving(self) -> Iterable[RadixNode]:
        """Deepest nodes of the paths that are locked for saves."""
        return [pin.node for pin in self.pins.values() if not pin.kept_of]

    @property
    def is_busy(self) -> bool:
        """True while a load, a save, kept pages, an order or a query is open."""
        return bool(self.loads or self.pins or self.has_orders)

    @property
    def has_orders(self) -> bool:
        """True if orders or queries wait to be taken."""
        return bool(self._orders.loads or self._orders.saves or self._queries)

    def look_up(self, requests: Iterable[Request]) -> list[KVQuery]:
        """Return queries about requests that are not known yet, and those that `fetch` has asked for, each once."""
        for request in list(requests):
            if request.id not in self._found and request.id not in self._asked:
                self._ask(request)
        queries, self._queries = self._queries, []
        return queries

    def _ask(self, request: Request) -> None:
        tokens = self._kv.matchable(request)
        pages = self._kv.cache.peek(request.cache_key, tokens)
        num_local = len(pages) if self._states is None else self._states.num_begun_by(pages.tolist())
        num_local = num_local if self._windows is None else self._windows.pages.num_reached(pages)
        self._queries.append(KVQuery(request.id, request.cache_key, tokens, num_local * self._kv.page_size))
        self._asked[request.id] = request
        request.move_to(RequestStatus.WAITING_FOR_REMOTE_KV)
        request.wait_reason = "waiting for KV sources to look up its prompt"

    def fetch(self, request: Request, match: PrefixMatch, step: int, spare: int, num_free_rows: int) -> str:
        """Order a load for a request if a source has more of it; return why it must wait, or ""."""
        found = self._found.get(request.id)
        if found is None:
            self._ask(request)
            return request.wait_reason
        end = min(found.num_tokens, len(self._kv.matchable(request))) // self._kv.page_size * self._kv.page_size
        is_whole = self._states is None and self._windows is None  # else nobody can begin before the end
        if end <= match.num_tokens or (not is_whole and end < found.num_tokens):
            return ""
        reason = "" if self._windows is None else self._windows.reason_to_wait(end // self.page_size, spare)
        if reason or len(self.loads) >= num_free_rows:
            return reason or "waiting to load KV: requests that do have claimed all free rows"
        if not self._kv.acquire(request, match, end, step, spare):
            return f"needs {self._kv.num_pages_for(end - match.num_tokens)} pages to load KV into"
        slot = -1 if self._states is None else self._states.begin_load()
        if slot is None:  # it does without
            self._kv.release(request, step)
            return ""
        self._load(request, found, match, slot)
        return request.wait_reason

    def _load(self, request: Request, found: Found, match: PrefixMatch, state_slot: int) -> None:
        first_page, held = len(match.pages), self._kv.pages(request)
        pages = held[first_page:]
        windows = UNSET if self._windows is None else self._windows.begin_load(request, match, len(held))
        self._last_id += 1
        order = LoadOrder(self._last_id, request.id, found.source, first_page, pages, found.where, state_slot, windows)
        self.loads[order.id] = Load(order, request)
        self._orders.loads.append(order)
        # Once: whatever becomes of it, the next turn of the request is its own.
        self._found[request.id] = msgspec.structs.replace(found, num_tokens=0)
        request.move_to(RequestStatus.WAITING_FOR_REMOTE_KV)
        request.wait_reason = f"loads {len(pages)} pages of KV from {found.source}"
        self._kv.announce(request)

    def _cached(self, cached: CachedPages) -> None:
        """Mark pages that the prefix cache has taken over as unsaved; save them once a running request has a chunk."""
        if not self._settings.stores:
            return
        request, pages = cached.request, cached.pages[cached.num_known :]
        self._is_saved[pages] = False
        if request.is_running:
            self._num_new[request.id] = count = self._num_new.get(request.id, 0) + len(pages)
            if count >= self._settings.save_chunk:
                self._save(request)

    def release(self, request: Request, step: int) -> None:
        """Save the pages of a request that ends or pauses; one that was preempted is looked up again."""
        self._found.pop(request.id, None)
        if self._settings.stores and (request.is_finished or request.is_resumable):
            self._save(request)
        self._num_new.pop(request.id, None)

    def _save(self, request: Request) -> None:
        """Offer all pages of a request's path from the first one on that was not offered before, and their states."""
        node = self._kv.node(request)
        pages = node.path_pages()
        if len(pages) < self._settings.min_saved and not request.is_resumable:
            return
        if not request.is_resumable and self.num_saving_pages >= SAVING_SHARE * self._kv.pool.num_usable:
            return
        prompt = (request.num_prompt_tokens - 1) // self._kv.page_size
        if self._order_save(node, request.cache_key, request.token_ids, pages, prompt):
            self._num_new.pop(request.id, None)

    def save_rest(self) -> None:
        """Order saves of all that the prefix cache has and that was not offered: its memory is about to be given up.

        Short prefixes, too: a conversation begins as one.
        """
        for node in [node for node in self._kv.cache.nodes() if node.is_leaf]:
            path = node.path()
            key = path[0].cache_key
            assert key is not None, "a path begins at a root"
            self._order_save(node, key, np.concatenate([part.tokens for part in path]), node.path_pages())

    def _order_save(
        self, node: RadixNode, key: CacheKey, tokens: TokenArray, pages: PageArray, prompt: int = 0
    ) -> bool:
        """Order a save of what was not offered of a path; return False if all was. `prompt`: pages of the prompt."""
        unsaved = np.flatnonzero(~self._is_saved[pages])
        first = int(unsaved[0]) if len(unsaved) else len(pages)
        states = [] if self._states is None else self._states.pin_unsaved(pages.tolist())
        if first == len(pages) and not states:
            return False
        self._is_saved[pages[first:]] = True
        self.num_saving_pages += len(pages) - first
        pin_id = self._pin(key, tokens, node, pages, len(pages) - first, states)
        windows = UNSET if self._windows is None else self._windows.begin_save(pin_id, pages, first, prompt)
        self._orders.saves.append(SaveOrder(pin_id, first, pages[first:].tolist(), states, windows=windows))
        return True

    def _export(self, export: Export, step: int) -> None:
        """Order a save of all that is cached of a prefix, with its states, for one source; maybe of nothing."""
        tokens = np.asarray(export.tokens, dtype=np.int32)
        node = self._kv.cache.match(export.cache_key, tokens, step).node
        if self._windows is not None:  # nobody can begin behind what is left of it
            tokens = tokens[: self._windows.pages.num_reached(node.path_pages()) * self.page_size]
            node = self._kv.cache.match(export.cache_key, tokens, step).node
        pages = node.path_pages()
        states = [] if self._states is None else self._states.pin_unsaved(pages.tolist(), exports=True)
        ends = len(pages), max(0, export.prompt - 1) // self.page_size
        pin_id = self._pin(export.cache_key, tokens, node, pages, states=states, ends=ends)
        windows = UNSET if self._windows is None else sorted(self.pins[pin_id].windows.items())
        order = SaveOrder(pin_id, 0, pages.tolist(), states, export.source, export.where, windows)
        self._orders.saves.append(order)

    def ended(self, request: Request) -> None:
        """Forget the answer for an ended request, and pin its pages if a source wants them kept."""
        for tell in self.on_ended:
            tell(request)
        if self._asked.pop(request.id, None) is not None:
            self._queries = [query for query in self._queries if query.request_id != request.id]
        found = self._found.pop(request.id, None)
        if found is not None and found.kept_for and request.finish_reason in _BY_ITSELF:
            node = self._kv.node(request)
            pages, whose = node.path_pages(), (request.id, found.kept_for)
            ends, key = ((request.num_prompt_tokens - 1) // self.page_size, len(pages)), request.cache_key
            states = [] if self._states is None else pin_states(self._states, self.pins.values(), pages, ends)
            self.kept[request.id] = self._pin(key, request.token_ids, node, pages, 0, states, whose, ends)

    def _pin(
        self,
        key: CacheKey,
        tokens: TokenArray,
        node: RadixNode,
        pages: PageArray,
        num_saving: int = 0,
        states: Sequence[tuple[int, int]] = (),
        whose: tuple[str, str] = ("", ""),
        ends: Sequence[int] = (),
    ) -> int:
        """Pin a path. `whose`: the request that it was of, and the source that wants it. `ends`: see `begin_export`."""
        self._kv.cache.lock(node)
        tokens = tokens[: len(pages) * self._kv.page_size].copy()
        self._last_id += 1
        windows = {} if self._windows is None else self._windows.begin_export(self._last_id, pages, ends)
        pin = Pin(node, key, tokens, pages, num_saving, dict(states), *whose, bool(ends), windows)
        self.pins[self._last_id] = pin
        return self._last_id

    def plan_fields(self) -> Mapping[str, Any]:
        """Return the orders for the next plan."""
        orders = self.take_orders()
        return {} if orders is None else {"transfers": orders}

    def take_orders(self) -> PlanTransfers | None:
        """Return the orders that no plan has yet, each once; None if there are none."""
        orders, self._orders = self._orders, _Orders()
        return PlanTransfers(orders.loads, orders.saves) if orders.loads or orders.saves else None

    def drop_saves(self, step: int) -> None:
        """Give up the saves that no plan has ordered yet, and unlock their pages."""
        saves, self._orders.saves = self._orders.saves, []
        for save in saves:
            self._unpin(save.id, False, step)

    def apply(self, event: TransferEvent, step: int) -> None:
        """Apply an answer, or the end of a load or a pin; ignore an event of something that is over."""
        match event:
            case Found():
                self._take_answer(event)
            case Loaded():
                self._end_load(event, step)
            case Released(pin_id, is_saved):
                self._unpin(pin_id, is_saved, step)
            case Export():
                self._export(event, step)

    def _take_answer(self, found: Found) -> None:
        # In a replay it is there before the request is asked about.
        self._found[found.request_id] = found
        request = self._asked.pop(found.request_id, None)
        if request is not None:
            request.move_to(RequestStatus.WAITING)
            request.wait_reason = ""

    def _end_load(self, loaded: Loaded, step: int) -> None:
        load = self.loads.pop(loaded.id, None)
        if load is None:
            return
        request, order, num_tokens = load.request, load.order, loaded.num_tokens
        first = order.first_page * self._kv.page_size
        if num_tokens > first:
            self.num_loaded_tokens += num_tokens - first
            if not request.num_preemptions:
                request.num_external_cached_tokens = num_tokens - first
            self._kv.cache_full_pages(request, num_tokens, step)
            if order.source in self._settings.stores:
                self._is_saved[order.page_ids[: (num_tokens - first) // self._kv.page_size]] = True
        if self._windows is not None:
            self._windows.end_load(request)
        if self._states is not None:
            is_whole = loaded.has_state and num_tokens == first + len(order.page_ids) * self._kv.page_size
            page = self._kv.cached_page(request, num_tokens) if is_whole else None
            self._states.end_load(order.state_slot, page)
        self._kv.release(request, step)
        if request.awaits_kv:
            request.move_to(RequestStatus.WAITING)
            request.wait_reason = ""

    def _unpin(self, pin_id: int, is_saved: bool, step: int) -> None:
        pin = self.pins.pop(pin_id, None)
        if pin is None:
            return
        for number in pin.states:
            assert self._states is not None, "states are pinned, and there are none"
            self._states.unpin(int(pin.pages[number - 1]), None if pin.is_export else is_saved)
        if self._windows is not None:
            self._windows.end_save(pin_id, is_saved)
        self._kv.cache.unlock(pin.node, step)
        if pin.kept_of:
            del self.kept[pin.kept_of]
            return
        self.num_saving_pages -= pin.num_saving
        if is_saved:
            self.num_stored_tokens += pin.num_saving * self._kv.page_size
        else:
            self._is_saved[pin.pages[len(pin.pages) - pin.num_saving :]] = False

    def counts(self) -> Mapping[str, Any]:
        """Return how many tokens were loaded and stored."""
        return {"num_loaded_tokens": self.num_loaded_tokens, "num_stored_tokens": self.num_stored_tokens}

    def check_invariants(self, owners: Sequence[Request], plans: Sequence[StepPlan]) -> None:
        """Raise AssertionError if a load, a save or a pin is lost. For tests."""
        check_pins(self.loads, self.pins, self._kv, self.num_saving_pages, set(self.kept.values()))
        if self._windows is not None:
            self._windows.check_invariants(one.id for one in (*owners, *(load.request for load in self.loads.values())))
