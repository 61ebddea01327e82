"""`StateSlots`: assign the slots of recurrent states to requests that own a row and to prefixes whose state was kept.

A layer with a recurrence has one state of a request, which runs on with its tokens and cannot go back.
So a prefix is found again only where its state was kept: at the ends of some pages, in a slot that belongs to the page
as long as the prefix cache has it.

    |<- page ->|<- page ->|<- page ->|<- tail ->|     a slot for the request, which is where its tokens end,
               ^ kept                ^ kept           and one for each state that was kept

A prompt's common prefix with others is known only when they come, so these states are kept: at the end of a prompt's
last full page (the same prompt again, and n answers), at the page where a request leaves what the cache has without a
state (the next one that shares it; after Marconi, Pan et al. 2025), where another request waits for it, and now and
then at the newest page of the text that goes on. Any of these may be given up for a request that needs a slot, the
least recently used first.

Slots are reused at once: steps run in order, so whatever reads a slot has read it before a later step writes it. But
sources of KV read and write slots beside the steps: a state that is being saved is pinned, and one that is loaded comes
into a slot that no launched step uses. Knows no clock; the same calls give the same choices.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from tokenmill.core.plan import PlanStates, StepPlan
from tokenmill.core.request import Request
from tokenmill.engine.kv.kv_manager import CachedPages, KVManager
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.resources.resource import Resource

# Tokens from one state of a text that goes on to the next: copying one must cost little beside running so many.
TAIL_SPACING = 64
# States of one request that others may wait for, at most.
MOST_CHECKPOINT_REQUESTS = 4


@dataclass(slots=True)
class _Kept:
    """A state at the end of a page.

    Attributes:
        tail_of: the request whose newest it is, which will replace it; "": none.
        num_pins: saves that read it. is_saved: a source has it, or will.
    """

    slot: int
    tail_of: str = ""
    num_pins: int = 0
    is_saved: bool = False


class _Save(msgspec.Struct, frozen=True):
    """A state that a launched step keeps: of the request's first `end` tokens."""

    end: int
    slot: int
    is_tail: bool


@dataclass(slots=True)
class StateCounts:
    """Counts since the start: states kept, states that requests began with, and states given up."""

    num_kept: int = 0
    num_hits: int = 0
    num_given_up: int = 0


@dataclass(slots=True)
class _Orders:
    """Loads and saves of states for the next plan."""

    loads: list[tuple[int, int]] = field(default_factory=list)
    saves: list[tuple[int, int, int]] = field(default_factory=list)


class StateSlots(Resource):
    """Slots of recurrent states, for requests with rows and for kept prefixes.

    Args:
        kv: the pages that kept states belong to; without a prefix cache none are kept.
        num_slots: at least as many as there are rows.
        splits: a step may end within a prompt, where a state is to be kept.
    """

    def __init__(self, kv: KVManager, num_slots: int, splits: bool = True) -> None:
        self.num_slots = num_slots
        self._kv = kv
        self._splits = splits
        self._counts = StateCounts()
        self._page_size = kv.page_size
        self._spacing = max(kv.page_size, TAIL_SPACING // kv.page_size * kv.page_size)
        self._keeps = kv.shares_prefixes
        self._free = list(range(num_slots))
        self._owned: dict[str, int] = {}  # by request
        self._kept: dict[int, _Kept] = {}  # by page, the least recently used first
        self._tails: dict[str, int] = {}  # by request, the page of its newest state
        self._checkpoints: dict[str, list[int]] = {}  # by request: tokens behind which its state is wanted, increasing
        self._saving: dict[int, dict[str, _Save]] = {}  # by step and request
        self._orders = _Orders()
        self._loading: set[int] = set()  # slots that a source fills
        self._used_in = [0] * num_slots  # by slot, the last step that reads or writes it
        self._last_ended = 0
        kv.on_cached.append(self._cached)
        kv.on_evicted.append(self._forget)
        kv.on_replaced.append(self._move)

    @property
    def num_kept(self) -> int:
        """Number of kept prefix states that a request could begin with."""
        return len(self._kept)

    def shorten(self, request: Request, match: PrefixMatch, step: int) -> PrefixMatch:
        """Return the prefix up to the last page with a kept state; `longer` is then the match."""
        pages = match.pages.tolist()
        depth = self.num_begun_by(pages)
        if depth == len(pages):
            return match
        return msgspec.structs.replace(self._kv.match(request, step, depth * self._page_size), longer=match)

    def can_follow(self, request: Request, writer: Request, match: PrefixMatch) -> bool:
        """Return True if `writer` will keep its state where it and the request part."""
        return self._request_checkpoint(writer, self._kv.num_common_tokens(request, writer), match.num_tokens)

    def limit(self, request: Request, start: int, num_tokens: int, match: PrefixMatch | None = None) -> tuple[int, str]:
        """End a step where a state is to be kept, if a later one is in it too: it keeps one of a request."""
        if self._splits and num_tokens > 1:
            checkpoints = self._checkpoints[request.id] if match is None else self._checkpoints_behind(request, match)
            inside = [checkpoint for checkpoint in checkpoints if start < checkpoint <= start + num_tokens]
            num_tokens = inside[0] - start if len(inside) > 1 else num_tokens
        return num_tokens, ""

    def _checkpoints_behind(self, request: Request, match: PrefixMatch) -> list[int]:
        """Return where a request that begins behind a match leaves the cache, and where its prompt ends, in order."""
        last = (request.num_prompt_tokens - 1) // self._page_size * self._page_size
        shared = (match.longer or match).num_tokens
        return sorted({checkpoint for checkpoint in (shared, last) if checkpoint > match.num_tokens})

    def acquire(self, request: Request, match: PrefixMatch, num_tokens: int, step: int) -> str:
        """Give a slot to a request that begins behind a match."""
        kept = None
        if len(match.pages):
            page = int(match.pages[-1])
            kept = self._kept[page] = self._kept.pop(page)  # the last to be given up
        slot = self._take()
        if slot is None:
            return "needs a recurrent state: steps in flight and saves use all that are left"
        self._owned[request.id], self._checkpoints[request.id] = slot, self._checkpoints_behind(request, match)
        self._used_in[slot] = step
        if kept is None:
            self._orders.loads.append((slot, -1))
            return ""
        self._counts.num_hits += 1
        self._let_stand(kept)  # others share it
        self._used_in[kept.slot] = step
        if kept.slot != slot:  # else it was the last one left: its own now
            self._orders.loads.append((slot, kept.slot))
        return ""

    def row_fields(self, request: Request) -> Mapping[str, Any]:
        """Return the slot of a request."""
        return {"state_slot": self._owned[request.id]}

    def _request_checkpoint(self, writer: Request, end: int, start: int) -> bool:
        """Ask that `writer` keep its state after `end` tokens for one that would begin at `start`; True if it will."""
        if end <= start:
            return False
        if any(saves[writer.id].end == end for saves in self._saving.values() if writer.id in saves):
            return True
        checkpoints = self._checkpoints.get(writer.id)
        if not self._keeps or checkpoints is None or end <= writer.num_computed_tokens:
            return False
        if end not in checkpoints:
            if len(checkpoints) >= MOST_CHECKPOINT_REQUESTS:
                return False
            bisect.insort(checkpoints, end)
        return True

    def schedule(self, request: Request, start: int, num_tokens: int, step: int) -> None:
        """Order that a state wanted of the tokens that run in a step be kept, if there is a slot for it.

        Drafts change no state before the end of the step, when it is known which were right.
        """
        if request.has_drafts:
            return
        checkpoints, end = self._checkpoints[request.id], start + num_tokens
        passed = bisect.bisect_right(checkpoints, end)
        checkpoint, is_tail = (
            (checkpoints[passed - 1], False) if passed else (end // self._spacing * self._spacing, True)
        )
        del checkpoints[:passed]
        if self._keeps and checkpoint > start and (slot := self._take()) is not None:
            assert request.row is not None, "a request that runs has a row"
            self._saving.setdefault(step, {})[request.id] = _Save(checkpoint, slot, is_tail)
            self._used_in[slot] = step
            self._orders.saves.append((request.row, checkpoint, slot))

    def can_rewind(self, request: Request) -> bool:
        """Return False: a state cannot go back; the request begins anew from the last one that was kept."""
        return False

    def _cached(self, cached: CachedPages) -> None:
        """Assign the state that a step has kept of a request to the last of its pages in the prefix cache."""
        request, saves = cached.request, self._saving.get(cached.step, {})
        if request.id in saves:
            page = self._kv.cached_page(request, saves[request.id].end)
            if page is not None:
                self._keep(request, saves.pop(request.id), page)

    def _keep(self, request: Request, save: _Save, page: int) -> None:
        if page in self._kept:  # another request's, of the same tokens
            self._give_back(save.slot)
            return
        self._counts.num_kept += 1
        self._kept[page] = _Kept(save.slot)
        if save.is_tail and request.id in self._owned:
            before = self._tails.pop(request.id, None)
            if before is not None:
                self._give_back(self._kept.pop(before).slot)
            self._kept[page].tail_of, self._tails[request.id] = request.id, page

    def end_step(self, step: int) -> None:
        """Release the states that a committed or failed step has kept without use."""
        self._last_ended = max(self._last_ended, step)
        for save in self._saving.pop(step, {}).values():
            self._give_back(save.slot)

    def release(self, request: Request, step: int) -> None:
        """Release the slot of a request that gives up its row; its newest state stays like other kept ones."""
        self._give_back(self._owned.pop(request.id))
        self._checkpoints.pop(request.id)
        page = self._tails.pop(request.id, None)
        if page is not None:
            self._kept[page].tail_of = ""

    def num_begun_by(self, pages: Sequence[int]) -> int:
        """Return how many of these pages, of a path from the root on, a request could begin behind."""
        return next((number for number in range(len(pages), 0, -1) if pages[number - 1] in self._kept), 0)

    def pin_unsaved(self, pages: Sequence[int], exports: bool = False) -> list[tuple[int, int]]:
        """Pin the states of a locked path that were not saved, or all: each one's number of pages, and its slot."""
        found = []
        for number, page in enumerate(pages, 1):
            kept = self._kept.get(page)
            if kept is not None and (exports or not kept.is_saved):
                self._let_stand(kept)
                kept.is_saved, kept.num_pins = kept.is_saved or not exports, kept.num_pins + 1
                found.append((number, kept.slot))
        return found

    def unpin(self, page: int, is_saved: bool | None) -> None:
        """Let go of the state behind a page, which was saved or not; None: it was exported."""
        kept = self._kept[page]
        kept.num_pins, kept.is_saved = kept.num_pins - 1, kept.is_saved if is_saved is None else is_saved

    def begin_load(self) -> int | None:
        """Return a slot for a state that a source loads, which no launched step uses; None if there is none."""
        slot = next((slot for slot in self._free if self._used_in[slot] <= self._last_ended), None)
        if slot is not None:
            self._free.remove(slot)
            heapq.heapify(self._free)
        else:
            slot = self._give_up(self._last_ended)
        if slot is not None:
            self._loading.add(slot)
        return slot

    def end_load(self, slot: int, page: int | None) -> None:
        """Keep a loaded state behind a page; None: it did not come."""
        self._loading.remove(slot)
        if page is None or page in self._kept:
            self._give_back(slot)
        else:
            self._kept[page] = _Kept(slot, is_saved=True)

    def _forget(self, pages: Iterable[int]) -> None:
        """Release the states of pages that the prefix cache has given up."""
        for page in pages:
            kept = self._kept.pop(page, None)
            if kept is not None:
                assert not kept.num_pins, "a page whose state is read was not locked"
                self._let_stand(kept)
                self._give_back(kept.slot)

    def _move(self, old: Iterable[int], new: Iterable[int]) -> None:
        """Move states from old pages to the new pages that the prefix cache has taken for them."""
        for before, after in zip(old, new, strict=True):
            kept = self._kept.pop(before, None)
            if kept is not None:
                self._kept[after] = kept  # a request has just passed it: the last to be given up
                if kept.tail_of:
                    self._tails[kept.tail_of] = after

    def plan_fields(self) -> Mapping[str, Any]:
        """Return the states to load and keep."""
        if not self._orders.loads and not self._orders.saves:
            return {}
        orders, self._orders = self._orders, _Orders()
        loads, saves = (np.array(rows, dtype=np.int32) for rows in (orders.loads, orders.saves))
        return {"states": PlanStates(*loads.reshape(-1, 2).T, *saves.reshape(-1, 3).T)}

    def counts(self) -> Mapping[str, Any]:
        """Return how many states were kept, used and given up."""
        counts = self._counts
        return {
            "num_states_kept": counts.num_kept,
            "num_state_hits": counts.num_hits,
            "num_states_given_up": counts.num_given_up,
        }

    def _take(self) -> int | None:
        """Take a free slot, or that of the least recently used state; None if there is none."""
        return heapq.heappop(self._free) if self._free else self._give_up()

    def _give_up(self, last_step: int | None = None) -> int | None:
        """Return the slot of the least recently used state that nobody reads, nor any step after `last_step`."""
        for page, kept in self._kept.items():
            if not kept.num_pins and (last_step is None or self._used_in[kept.slot] <= last_step):
                self._counts.num_given_up += 1
                del self._kept[page]
                self._let_stand(kept)
                return kept.slot
        return None

    def _let_stand(self, kept: _Kept) -> None:
        """Let no request replace this state by its newest."""
        if kept.tail_of:
            del self._tails[kept.tail_of]
            kept.tail_of = ""

    def _give_back(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def check_invariants(self, owners: Sequence[Request], plans: Sequence[StepPlan]) -> None:
        """Raise AssertionError if a slot is lost, has two owners, or an owner that is gone."""
        saving = [save.slot for saves in self._saving.values() for save in saves.values()]
        kept_slots = [kept.slot for kept in self._kept.values()]
        slots = [*self._free, *self._owned.values(), *kept_slots, *saving, *self._loading]
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost, or is that of two"
        assert self._owned.keys() == {request.id for request in owners}, "a slot for a request without a row"
        assert self._owned.keys() == self._checkpoints.keys(), "checkpoints of a request without a row"
        assert self._kept.keys() <= set(self._kv.cached_pages()), "a state at the end of a page that the cache has not"
        tails = {kept.tail_of: page for page, kept in self._kept.items() if kept.tail_of}
        assert tails == self._tails, "a newest state that is another's"
