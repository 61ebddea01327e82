"""Conversations as files: llama.cpp's slots, of which an operator saves one with its KV, restores or erases one.

    save      the scheduler orders an export of the slot's prefix ──> a thread of the order writes the file
    restore   a thread checks the file ──> its pages are found like those of a disk, and loaded when a prompt begins so

A slot is the place of one conversation: a request that ends with the tokens of a slot and more takes its place, another
one an empty slot, or that which was used least recently. Slots hold tokens; their KV is in the prefix cache.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
from msgspec import UNSET

from tokenmill.core.engine_messages import EngineReply, SlotSeen
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.extension import EngineExtension, Host
from tokenmill.core.messages import ActOnSlot, EngineControl, TokenOutput
from tokenmill.core.request import CacheKey, Request, TokenArray
from tokenmill.core.transfers import Export
from tokenmill.engine.transfer.orders import PageSave
from tokenmill.engine.transfer.page_keys import page_keys
from tokenmill.engine.transfer.session_file import Content, SavedSession, SessionForm
from tokenmill.engine.transfer.slot_format import SlotFormat, read_elsewhere
from tokenmill.engine.transfer.slot_table import PrefixTables, SlotTable
from tokenmill.engine.transfer.slots import NeighbourSlot, Slot
from tokenmill.engine.transfer.tier import Tier

NAME = "sessions"
# A conversation goes on in its slot if so much of what it had begins the new one; templates change the end of a turn.
SHARE_IN_COMMON = 0.9
# Actions whose end nobody has asked for yet.
_MOST_ACTIONS = 256


class FileSlots:
    """A slot store, for reading alone, in the session files that were restored."""

    num_slots = 0

    def __init__(self, form: SlotFormat) -> None:
        self.page_bytes, self.checksum, self._form = form.page_bytes, form.checksum, form

    def slots(self) -> Iterator[Slot]:
        """Yield nothing: files are restored later."""
        return iter(())

    def rewrite(self, slots: Iterable[Slot]) -> None:
        """Do nothing: files stay as they are."""

    append = rewrite

    def write(self, number: int, data: memoryview) -> None:
        """Refuse: files stay as they are."""
        raise AssertionError("a session file is written as a whole")

    def expect(self, slots: Sequence[Slot]) -> None:
        """Do nothing: each run opens its file."""

    def read_pages(self, slots: Sequence[Slot], data: memoryview) -> int:
        """Read pages of one file; 0 if it is gone."""
        return read_elsewhere(self._form, cast("Sequence[NeighbourSlot]", slots), data)

    def close(self) -> None:
        """Do nothing: no file is open."""


class SessionFiles(Tier):
    """The source of KV that has what session files have; it writes one when the scheduler orders an export.

    Attributes:
        on_saved: called, by any thread, with the ticket of an export that is over and what became of it.
        wanted: all tokens of the conversations that are exported, by ticket.
    """

    stores = False

    def __init__(self, form: SessionForm, page_size: int, window: int = 0) -> None:
        pages, states, windows = (
            None if one is None else SlotTable(NAME, FileSlots(one)) for one in (form.pages, form.states, form.windows)
        )
        assert pages is not None, "every model has pages"
        super().__init__(PrefixTables(pages, page_size, states, windows, window))
        self.form = form
        self.on_saved: Callable[[str, SlotSeen], None] | None = None
        self.wanted: dict[str, list[int]] = {}

    def restore(self, session: SavedSession) -> None:
        """Have the pages of a checked file found from now on."""
        with self._lock:
            tables = self.tables.pages, self.tables.states, self.tables.windows
            for table, slots in zip(tables, (session.pages, session.states, session.windows), strict=True):
                if table is not None:
                    for slot in slots:
                        table.put(slot)

    def save(self, save: PageSave) -> None:
        """Write the file of an export, in a thread of its own."""
        threading.Thread(target=self._write_file, args=(save,), name="kv-session", daemon=True).start()

    def _write_file(self, save: PageSave) -> None:
        seen = SlotSeen("", error="the session could not be saved")
        ticket, _, path = save.order.where.partition(" ")
        tokens = self.wanted.pop(ticket, None) or save.tokens.tolist()
        try:
            keys = list(page_keys(save.cache_key, save.tokens, self._page_size))
            pages = [Content(*key, partial(save.read, index)) for index, key in enumerate(keys)]
            states = [Content(*keys[count - 1], partial(save.read_state, slot)) for count, slot in save.order.states]
            windows = [Content(*keys[number], partial(save.read_window, page)) for number, page in _windows_of(save)]
            if not pages:
                raise InvalidRequest("no KV of this slot is cached any more: continue the conversation, then save it")
            if self.form.windows is not None and (not windows or windows[-1].key != pages[-1].key):
                raise InvalidRequest("all pages of windows are promised to requests: save the session again later")
            num_bytes = self.form.write(Path(path), save.cache_key, tokens, (pages, states, windows))
            seen = SlotSeen("", num_tokens=len(save.tokens), num_bytes=num_bytes)
        except InvalidRequest as error:
            seen = SlotSeen("", error=str(error))
        except OSError as error:
            seen = SlotSeen("", error=f"the session cannot be written: {error.strerror or error}")
        finally:
            save.finish(not seen.error)
            if self.on_saved is not None:
                self.on_saved(ticket, seen)


def _windows_of(save: PageSave) -> list[tuple[int, int]]:
    return [] if save.order.windows is UNSET else save.order.windows


class _Conversation(msgspec.Struct, frozen=True):
    cache_key: CacheKey
    tokens: TokenArray
    num_prompt: int


class Conversations:
    """The tokens of the last conversations, each in its slot. `num_slots`: how many there are."""

    def __init__(self, num_slots: int) -> None:
        # By slot, the least recently used first.
        self._slots: OrderedDict[int, _Conversation | None] = OrderedDict.fromkeys(range(num_slots))

    def __contains__(self, slot: int) -> bool:
        return slot in self._slots

    def get(self, slot: int) -> tuple[CacheKey, TokenArray, int] | None:
        """Return whose tokens a slot has, the tokens, and how many its last prompt had; None: it is empty."""
        found = self._slots[slot]
        return None if found is None else (found.cache_key, found.tokens, found.num_prompt)

    def put(self, slot: int, key: CacheKey, tokens: Sequence[int] | TokenArray, num_prompt: int = 0) -> None:
        """Let a conversation take a slot. `num_prompt`: tokens of its last prompt; 0: it is not known."""
        self._slots[slot] = _Conversation(key, np.array(tokens, dtype=np.int32), num_prompt)
        self._slots.move_to_end(slot)

    def erase(self, slot: int) -> int:
        """Empty a slot; return how many tokens it had."""
        found, self._slots[slot] = self._slots[slot], None
        self._slots.move_to_end(slot, last=False)
        return 0 if found is None else len(found.tokens)

    def add(self, request: Request) -> None:
        """Take in a request that has ended: in the slot of what it continues, an empty one, or the oldest."""
        key, tokens = request.cache_key, request.token_ids
        slot = max(self._slots, key=lambda slot: (self._continues(slot, key, tokens), self._slots[slot] is None))
        if not self._continues(slot, key, tokens):
            empty = (slot for slot in sorted(self._slots) if self._slots[slot] is None)
            slot = next(empty, next(iter(self._slots)))
        self.put(slot, key, tokens, request.num_prompt_tokens)

    def _continues(self, slot: int, key: CacheKey, tokens: TokenArray) -> int:
        """Return how many tokens of a slot begin the new ones; 0 if these are too few."""
        found = self._slots[slot]
        if found is None or found.cache_key != key:
            return 0
        size = min(len(found.tokens), len(tokens))
        different = np.flatnonzero(found.tokens[:size] != tokens[:size])
        count = int(different[0]) if len(different) else size
        return count if count >= SHARE_IN_COMMON * len(found.tokens) else 0


class SlotActions(EngineExtension):
    """Answers what operators do with slots. An action goes on in a thread; the same ticket asks for its end."""

    def __init__(self, files: SessionFiles, folder: Path, num_slots: int, page_size: int) -> None:
        self._files, self._folder, self._page_size = files, folder, page_size
        self.conversations = Conversations(num_slots)
        self._exports: list[Export] = []
        self._restored: deque[tuple[int, SavedSession]] = deque()  # by threads
        self._seen: OrderedDict[str, SlotSeen] = OrderedDict()  # by ticket
        files.on_saved = self._seen.__setitem__

    @property
    def has_waiting(self) -> bool:
        """True while an action waits for the engine's next turn."""
        return bool(self._exports or self._restored)

    def wait(self, timeout: float) -> None:
        """Return at once: the next turn takes all that waits."""

    def poll(self, engine: Host) -> Sequence[TokenOutput]:
        """Have the scheduler order the exports that were asked for; give restored conversations their slots."""
        while self._restored:
            slot, session = self._restored.popleft()
            self.conversations.put(slot, session.cache_key, session.tokens)
        exports, self._exports = self._exports, []
        if exports:
            engine.apply_transfer_events(exports)
        return ()

    def answer(self, message: EngineControl) -> EngineReply | None:
        """Begin an action, or return what has become of it."""
        if not isinstance(message, ActOnSlot):
            return None
        if message.ticket not in self._seen:
            self._seen[message.ticket] = SlotSeen("", is_done=False)
            while len(self._seen) > _MOST_ACTIONS:
                self._seen.popitem(last=False)
            try:
                self._begin(message)
            except InvalidRequest as error:
                self._seen[message.ticket] = SlotSeen("", error=str(error))
        return msgspec.structs.replace(self._seen[message.ticket], id=message.id)

    def _begin(self, message: ActOnSlot) -> None:
        slot, path = message.slot, self._folder / message.file
        is_plain = path.name == message.file and not message.file.startswith(".")
        if message.action != "erase" and not is_plain:
            raise InvalidRequest("filename must be the name of a file in --slot-save-path, without folders")
        if slot not in self.conversations:
            raise InvalidRequest(f"there is no slot {slot}; see /slots")
        match message.action:
            case "erase":
                self._seen[message.ticket] = SlotSeen("", num_tokens=self.conversations.erase(slot))
            case "save":
                found = self.conversations.get(slot)
                if found is None:
                    raise InvalidRequest(f"slot {slot} is empty: it takes the next conversation")
                key, tokens, num_prompt = found
                self._files.wanted[message.ticket] = tokens.tolist()
                self._exports.append(Export(NAME, f"{message.ticket} {path}", key, tokens.tolist(), num_prompt))
            case _:
                restore = partial(self._restore, message.ticket, slot, path)
                threading.Thread(target=restore, name="kv-session", daemon=True).start()

    def _restore(self, ticket: str, slot: int, path: Path) -> None:
        try:
            session = self._files.form.read(path)
            self._files.restore(session)
            self._restored.append((slot, session))
            count = len(session.pages) * self._page_size
            self._seen[ticket] = SlotSeen("", num_tokens=count, num_bytes=session.num_bytes)
        except (InvalidRequest, OSError) as error:
            self._seen[ticket] = SlotSeen("", error=str(error))
