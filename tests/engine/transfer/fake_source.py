"""A source of KV that does whatever a bad network and a bad peer do, and an engine that has one.

It keeps pages by the tokens up to their end. What it does is drawn from its generator: it answers late, promises too
much, loses pages, fills pages twice, says twice that it is done or never, and goes on after it was cancelled. Pages
that are kept it reads at each turn: they must hold what they held.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.engine.scheduler.harness import Harness, Settings
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import CacheKey, TokenArray
from tokenmill.core.transfers import KVQuery, TransferSettings
from tokenmill.engine.transfer.checksum import find_checksum
from tokenmill.engine.transfer.connector import KVConnector, TransferTimeouts
from tokenmill.engine.transfer.orders import Movers, PageLoad, PageSave, write_one_by_one
from tokenmill.engine.transfer.protocol import Answer, KeptPages
from tokenmill.engine.transfer.state import TransferState
from tokenmill.lab.conformance.memory_runner import VOCAB_SIZE, PagedMemoryRunner

# In turns of the engine: the clock of these tests.
PATIENCE = TransferTimeouts(lookup=4, load=8, save=8, keep=10, close=50)


def _as_written(tokens: TokenArray) -> NDArray[np.int64]:
    """Return tokens as the runner writes them: images have surrogates here, and placeholders there."""
    return np.where(tokens < VOCAB_SIZE, tokens, VOCAB_SIZE - 1).astype(np.int64)


class TokenMover:
    """Pages of the paged-memory runner, as bytes; those of its window group, if `of_windows`."""

    def __init__(self, runner: PagedMemoryRunner, of_windows: bool = False) -> None:
        assert runner.windows is not None or not of_windows
        self._memory = runner.windows.memory if of_windows and runner.windows else runner.memory
        self.page_bytes = runner.page_size * 8
        self.layout = "tokens"

    def read(self, page: int, data: memoryview) -> None:
        data[:] = self._memory[page].tobytes()

    def write(self, page: int, data: memoryview) -> None:
        self._memory[page] = np.frombuffer(data, dtype=np.int64)

    def write_good(self, pages: Sequence[int], data: memoryview, checksums: Sequence[int]) -> int:
        return write_one_by_one(self, pages, data, checksums)


class StateMover:
    """Recurrent states of the paged-memory runner, as bytes: the number of tokens that one has seen, then these."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self.page_bytes = 4 * 64  # prompts of traces are shorter
        self.layout = "states"

    def read(self, slot: int, data: memoryview) -> None:
        seen = self._harness.runner.states[slot]
        numbers = np.zeros(len(data) // 4, dtype=np.int32)
        numbers[: len(seen) + 1] = [len(seen), *seen]
        data[:] = numbers.tobytes()

    def write(self, slot: int, data: memoryview) -> None:
        assert slot not in self._used(), "a state is loaded where a launched step reads or writes one"
        count, *numbers = np.frombuffer(data, dtype=np.int32).tolist()
        self._harness.runner.states[slot] = numbers[:count]

    def write_good(self, pages: Sequence[int], data: memoryview, checksums: Sequence[int]) -> int:
        return write_one_by_one(self, pages, data, checksums)

    def _used(self) -> set[int]:
        """Return the slots of the launched steps. One that has failed touches no state, and its rows have none."""
        used: set[int] = set()
        for step in self._harness.scheduler.in_flight:
            if step.outcome is not None and step.outcome.error is not None:
                continue
            used |= {self._harness.runner.state_slots[row] for row in step.plan.rows.tolist()}
            if (states := step.plan.states) is not None:
                for slots in (states.load_slots, states.load_sources, states.save_slots):
                    used |= set(slots.tolist())
        return used


class FakeSource:
    """A source of KV with the faults of a bad network and a bad peer. `trouble`: how often one happens, 0 to 1."""

    def __init__(
        self,
        name: str,
        movers: Movers,
        page_size: int,
        generator: random.Random,
        trouble: float,
        stores: bool = True,
        window: int = 0,
    ) -> None:
        self.name = name
        self.stores = stores
        self.pages: dict[tuple[CacheKey, bytes], bytes] = {}
        self.states: dict[tuple[CacheKey, bytes], bytes] = {}
        self.known: dict[str, None] = {}
        counts = ["later", "loaded", "lost", "late", "saved", "kept", "expired", "states", "windows"]
        self.counts = dict.fromkeys([*counts, "kept windows", "kept states"], 0)
        self.windows: dict[tuple[CacheKey, bytes], bytes] = {}
        self._window = window
        self._mover, self._states, self._windows_mover = movers.pages, movers.states, movers.windows
        self._page_size = page_size
        self._generator = generator
        self._trouble = trouble
        self._loads: list[PageLoad] = []
        self._saves: list[PageSave] = []
        self._kept: dict[int, KeptPages] = {}

    def _goes_wrong(self) -> bool:
        return self._generator.random() < self._trouble

    def put(self, key: CacheKey, tokens: TokenArray) -> None:
        """Have the pages of a prompt, as if another engine had computed them."""
        for end in range(self._page_size, len(tokens) + 1, self._page_size):
            page = np.array(tokens[end - self._page_size : end], dtype=np.int64)
            prefix = np.array(tokens[:end], dtype=np.int32)
            self.pages[key, prefix.tobytes()] = page.tobytes()
            if self._states is not None and self._generator.random() < 0.5:
                self.states[key, prefix.tobytes()] = self._state_of(prefix)
            if self._window and self._generator.random() < 0.8:
                self.windows[key, prefix.tobytes()] = page.tobytes()

    def _state_of(self, prefix: TokenArray) -> bytes:
        assert self._states is not None
        numbers = np.zeros(self._states.page_bytes // 4, dtype=np.int32)
        numbers[: len(prefix) + 1] = [len(prefix), *_as_written(prefix)]
        return numbers.tobytes()

    def arrived(self, request_id: str, params: dict[str, Any]) -> None:
        if params.get("bad"):
            raise InvalidRequest("these parameters are bad", "kv_transfer_params")
        self.known[request_id] = None

    def lookup(self, query: KVQuery, params: dict[str, Any] | None) -> Answer | None:
        self.known[query.request_id] = None
        if self._goes_wrong():
            self.counts["later"] += 1
            return None
        ends = range(self._page_size, len(query.tokens) + 1, self._page_size)
        num_pages = next((n for n, end in enumerate(ends) if not self._page(query.cache_key, query.tokens, end)), None)
        found = len(ends) if num_pages is None else num_pages
        while found and not self._can_begin(query.cache_key, query.tokens, ends[found - 1]):
            found -= 1
        if self._goes_wrong():
            found = self._generator.randint(0, found + 2)
        keeps = bool(params and params.get("keep"))
        return Answer(found * self._page_size, found.to_bytes(2, "big"), keeps)

    def _page(self, key: CacheKey, tokens: TokenArray, end: int) -> bytes | None:
        return self.pages.get((key, tokens[:end].tobytes()))

    def _can_begin(self, key: CacheKey, tokens: TokenArray, end: int) -> bool:
        if self._states is not None and (key, tokens[:end].tobytes()) not in self.states:
            return False
        return all((key, tokens[:each].tobytes()) in self.windows for each in self._ends_in_window(end))

    def _ends_in_window(self, end: int) -> range:
        """Return the ends of the pages that a token at `end` sees in its window."""
        first = max(0, end - self._window + 1) // self._page_size
        return range((first + 1) * self._page_size, end + 1 if self._window else 0, self._page_size)

    def load(self, load: PageLoad) -> None:
        self._loads.append(load)

    def save(self, save: PageSave) -> None:
        self._saves.append(save)

    def ended(self, kept: KeptPages) -> dict[str, Any] | None:
        self._kept[kept.id] = kept
        return {"kept": kept.id, "num_tokens": len(kept.tokens)}

    def forget(self, request_id: str) -> None:
        assert request_id in self.known, "forgotten twice, or never known"
        del self.known[request_id]

    def poll(self) -> list[int]:
        self._loads = [load for load in self._loads if not self._go_on_loading(load)]
        self._saves = [save for save in self._saves if not self._go_on_saving(save)]
        released = []
        for kept in list(self._kept.values()):
            self._check_kept(kept)
            if self._generator.random() < 0.3 and not self._goes_wrong():
                self.counts["kept"] += 1
                released.append(kept.id)
                del self._kept[kept.id]
        return released

    def _go_on_loading(self, load: PageLoad) -> bool:
        """A turn's work for a load; True if it needs no more turns."""
        for number in range(len(load.order.page_ids)):
            if self._goes_wrong():
                continue  # lost, or not there yet
            if self._generator.random() < 0.6:
                self._fill(load, number)
        state = self.states.get((load.cache_key, load.tokens.tobytes()))
        if state is not None and load.order.state_slot >= 0 and not self._goes_wrong():
            self._fill_state(load, memoryview(state))
            self.counts["states"] += load.has_state
        if load.order.windows and not self._goes_wrong():
            self._fill_windows(load, load.order.windows)
        if load.is_over:
            return True
        if load.num_filled == len(load.order.page_ids) or self._goes_wrong():
            self.counts["loaded" if load.num_filled == len(load.order.page_ids) else "lost"] += 1
            load.finish()
            if self._goes_wrong():
                load.finish()
                return False  # and fills it again, later
            return True
        return False

    def _fill(self, load: PageLoad, number: int) -> None:
        page = self._page(load.cache_key, load.tokens, (load.order.first_page + number + 1) * self._page_size)
        if page is None:
            return  # it has promised too much, or was reset
        was_over = load.is_over
        assert load.fill(number, memoryview(page)) != was_over, "a load that is over is filled"
        self.counts["late"] += was_over

    def _fill_state(self, load: PageLoad, state: memoryview) -> None:
        """Fill the state as a disk does, or as another engine does: that may be damaged, and is not used then."""
        if self._generator.random() < 0.5:
            load.fill_state(state)
            return
        _, checksum = find_checksum()
        was_over, is_bad = load.is_over, self._goes_wrong()
        good = load.fill_good_state(0, state, [checksum(state) ^ is_bad])
        assert good == (not was_over and not is_bad), "a damaged state is used, or one comes late"

    def _fill_windows(self, load: PageLoad, windows: list[int]) -> None:
        """Fill the pages of the window group, up to the first that is missing."""
        _, checksum = find_checksum()
        ends = range(self._page_size, len(load.tokens) + 1, self._page_size)[-len(windows) :]
        for number, end in enumerate(ends):
            page = self.windows.get((load.cache_key, load.tokens[:end].tobytes()))
            if page is None or self._goes_wrong():
                return
            was_over = load.is_over
            filled = load.fill_windows(number, memoryview(page), [checksum(memoryview(page))])
            assert filled != was_over, "a load that is over is filled"
            self.counts["windows"] += filled

    def _go_on_saving(self, save: PageSave) -> bool:
        """A turn's work for a save; True if it needs no more turns."""
        if self._goes_wrong():
            return False
        data = bytearray(self._mover.page_bytes)
        for number in range(len(save.order.page_ids)):
            end = (save.order.first_page + number + 1) * self._page_size
            if not save.read(number, memoryview(data)):
                return True
            expected = _as_written(save.tokens[end - self._page_size : end]).tobytes()
            assert bytes(data) == expected, "a page that is saved holds something else"
            self.pages[save.cache_key, save.tokens[:end].tobytes()] = bytes(data)
        for num_pages, slot in save.order.states:
            prefix, state = save.tokens[: num_pages * self._page_size], bytearray(len(self._state_of(save.tokens[:0])))
            if not save.read_state(slot, memoryview(state)):
                return True
            assert bytes(state) == self._state_of(prefix), "a state that is saved has seen something else"
            self.states[save.cache_key, prefix.tobytes()] = bytes(state)
        for number, page in save.order.windows or ():
            end = (number + 1) * self._page_size
            if not save.read_window(page, memoryview(data)):
                return True
            expected = _as_written(save.tokens[end - self._page_size : end]).tobytes()
            assert bytes(data) == expected, "a window page that is saved holds something else"
            self.windows[save.cache_key, save.tokens[:end].tobytes()] = bytes(data)
        self.counts["saved"] += 1
        save.finish(is_saved=not self._goes_wrong())
        return True

    def _check_kept(self, kept: KeptPages) -> None:
        data = bytearray(self._mover.page_bytes)
        for number, page in enumerate(kept.page_ids):
            self._mover.read(page, memoryview(data))
            expected = _as_written(kept.tokens[number * self._page_size : (number + 1) * self._page_size])
            assert bytes(data) == expected.tobytes(), "a page that is kept holds something else"
        for number, page in kept.windows.items():
            assert self._windows_mover is not None
            self._windows_mover.read(page, memoryview(data))
            expected = _as_written(kept.tokens[number * self._page_size : (number + 1) * self._page_size])
            assert bytes(data) == expected.tobytes(), "a window page that is kept holds something else"
            self.counts["kept windows"] += 1
        for num_pages, slot in kept.states.items():
            assert self._states is not None
            state = bytearray(self._states.page_bytes)
            self._states.read(slot, memoryview(state))
            expected_state = self._state_of(kept.tokens[: num_pages * self._page_size])
            assert bytes(state) == expected_state, "a state that is kept has seen something else"
            self.counts["kept states"] += 1

    def expired(self, kept_id: int) -> None:
        self.counts["expired"] += 1
        self._kept.pop(kept_id, None)

    def reset(self) -> None:
        self.pages.clear()
        self.states.clear()
        self.windows.clear()

    def close(self) -> None:
        self._loads, self._saves, self._kept = [], [], {}


class ImpatientDesk(KVConnector):
    """Its clock counts turns, so it never waits."""

    def wait(self, timeout: float) -> None:
        pass


class TransferHarness(Harness):
    """An engine with fake sources; each turn of its loop is a second to it."""

    def __init__(self, settings: Settings, generator: random.Random, trouble: float, policy: str = "recompute") -> None:
        self.turn = 0
        self.sources: list[FakeSource] = []
        settings.transfers = TransferSettings(("store",), save_chunk=2, min_saved=1)

        def connect(harness: Harness) -> KVConnector:
            states = StateMover(harness) if settings.state_slots else None
            windows = TokenMover(harness.runner, of_windows=True) if settings.window else None
            movers = Movers(TokenMover(harness.runner), states, windows)
            window = settings.window.window if settings.window else 0
            self.sources = [
                FakeSource("peer", movers, settings.page_size, generator, trouble, False, window),
                FakeSource("store", movers, settings.page_size, generator, trouble, True, window),
            ]
            state = harness.scheduler.resource(TransferState)
            return ImpatientDesk(self.sources, state, movers, policy, PATIENCE, lambda: self.turn)  # type: ignore[arg-type]

        settings.connect = connect
        super().__init__(settings)

    def step(self) -> None:
        self.turn += 1
        super().step()

    def most_steps(self) -> int:
        """Beside each step a request may wait for an answer, for a load and for the saves that hold its pages."""
        return super().most_steps() * 40

    def settle(self) -> None:
        """All that is outside has ended after so many turns."""
        for _ in range(12):
            self.step()
        assert self.connector is not None
        assert not self.connector.has_waiting, "something outside is never over"
        for source in self.sources:
            assert not source.known, f"{source.name} remembers requests that have ended: {source.known}"
