"""The collective of one machine: memory that all ranks map, where each writes its part and reads those of the others.

A gather is: write your part, meet, read. Nothing is copied, and no sum changes its order. Two rooms take turns, so that
a rank may still read one while another already writes the next. The memory has no name (memfd): it is gone with the
last rank, however that ended.
"""

from __future__ import annotations

import importlib
import mmap
import os
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import EngineFailed
from tokenmill.engine.parallel.layout import NOTE_BYTES, SIGNAL_BYTES, SLOTS, Layout
from tokenmill.engine.parallel.messages import Command
from tokenmill.model.kernels.native import MODULE
from tokenmill.model.sharding.collective import Lookup, NativeRoom
from tokenmill.model.sharding.shard import MOST_RANKS, Part, Shard
from tokenmill.platform.arrays import itemsize
from tokenmill.platform.host_arrays import library_of

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import AnyArray

# How long a rank looks for the others before it sleeps: longer than ranks with a core each are apart, by a kernel of
# a small model; and with fewer cores than ranks not at all, because the core may be the one that another needs.
SPIN_SECONDS = 50e-6
_LENGTH_BYTES = 8
_OVER, _TIMEOUT, _GIVEN_UP, _GONE = range(4)


class Note(msgspec.Struct):
    """A rank's message to the others about itself.

    Attributes:
        num_pages: pages that its KV cache has room for; 0: not known yet.
        trouble: why it gave up.
    """

    pid: int = 0
    num_pages: int = 0
    trouble: str = ""


class SharedMemory:
    """Collective over shared memory. A rank that raises, or waits in vain, gives up for all: no rank waits any more."""

    def __init__(self, descriptor: int, layout: Layout, shard: Shard) -> None:
        """Map the memory; call `join` before anything else."""
        native = importlib.import_module(MODULE)
        assert native.RANKS_BYTES <= SIGNAL_BYTES and native.MOST_RANKS == MOST_RANKS, "native/ranks.h says the same"
        self.shard = shard
        self.layout = layout
        self._descriptor = descriptor
        self._end = layout.num_bytes
        self._bytes = np.frombuffer(mmap.mmap(descriptor, layout.num_bytes), np.uint8)
        self._ranks: _native.Ranks | None = None
        self._timeout = 0.0
        self._peers = select.poll()
        self._room = 0
        self._num_posts = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)

    def join(self, peers: Sequence[int], timeout: float, spins: bool) -> None:
        """Get ready to meet the other ranks.

        Args:
            peers: descriptors of their processes (pidfd).
            timeout: seconds within which they must come.
            spins: every rank has a core of its own.
        """
        native = importlib.import_module(MODULE)
        address, rank, size = self._bytes.ctypes.data + self.layout.signals, self.shard.rank, self.shard.size
        spin = SPIN_SECONDS if spins else 0.0
        self._ranks = native.Ranks(address, rank, size, spin, timeout, list(peers))
        self._timeout = timeout
        for peer in peers:
            self._peers.register(peer, select.POLLIN)

    @property
    def _joined(self) -> _native.Ranks:
        assert self._ranks is not None, "a rank joins before it meets"
        return self._ranks

    def extend(self, num_bytes: int, patience: float) -> npt.NDArray[np.uint8]:
        """Map zeroed memory behind all that ranks share so far; all of them ask for it, in the same order.

        The system hands it out as it is first written, to the node of the rank that writes.
        """
        start, size = self._end, -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._end += size
        if self.shard.rank == 0:
            os.ftruncate(self._descriptor, self._end)
        self.meet(patience)
        return np.frombuffer(mmap.mmap(self._descriptor, size, offset=start), np.uint8)[:num_bytes]

    # --- notes ------------------------------------------------------------------------------------------------------

    def write_note(self, note: Note) -> None:
        """Tell the others of this rank. A note that is too long is cut."""
        data = msgspec.json.encode(msgspec.structs.replace(note, trouble=note.trouble[: NOTE_BYTES // 8]))
        own = self._note(self.shard.rank)
        own[: len(data)] = np.frombuffer(data, np.uint8)
        own[len(data) :] = 0

    def read_note(self, rank: int) -> Note:
        """Return a rank's last note; an empty one while it is writing."""
        try:
            return msgspec.json.decode(self._note(rank).tobytes().rstrip(b"\0"), type=Note)
        except msgspec.DecodeError:
            return Note()

    def _note(self, rank: int) -> np.ndarray:
        start = self.layout.notes + rank * NOTE_BYTES
        return self._bytes[start : start + NOTE_BYTES]

    # --- meeting ----------------------------------------------------------------------------------------------------

    def meet(self, timeout: float | None = None) -> None:
        """Wait until all ranks have come.

        Raises:
            EngineFailed: a rank is gone, has given up, or has not come in time.
        """
        self._check(self._joined.meet(self._timeout if timeout is None else timeout))

    def _check(self, outcome: int) -> None:
        if outcome != _OVER:
            raise self.failure(outcome)

    def failure(self, outcome: int | None = None) -> EngineFailed:
        """Give up, and return why. `outcome`: of a wait; None: of the last meeting."""
        first, outcome = self._joined.rank_that_gave_up, self._joined.last_meeting if outcome is None else outcome
        if first == self.shard.rank:
            return EngineFailed(f"rank {first} cannot go on: {self.read_note(first).trouble}")
        if first >= 0:
            trouble = f"rank {first} has given up: {self.read_note(first).trouble or 'for an unknown reason'}"
        elif outcome == _GONE:
            trouble = "another rank is gone"
        else:
            trouble = f"another rank has not come in time; {self._timeout:g} seconds are allowed in a step"
        self.give_up(trouble)
        return EngineFailed(f"rank {self.shard.rank} cannot go on: {trouble}")

    def look(self, since: float) -> None:
        """Check that nothing keeps the other ranks from going on, while they are waited for by other means.

        Args:
            since: when the wait began, by `time.monotonic`.

        Raises:
            EngineFailed: a rank is gone, has given up, or takes longer than a step may.
        """
        if self.is_broken or any(ready for _, ready in self._peers.poll(0)):
            raise self.failure(_GONE)
        if time.monotonic() - since > self._timeout:
            raise self.failure(_TIMEOUT)

    def give_up(self, trouble: str) -> None:
        """Let no other rank wait any longer; the reason of the first to give up counts."""
        if self._ranks is not None and self._ranks.rank_that_gave_up < 0:
            self.write_note(Note(trouble=trouble))
            self._ranks.give_up()

    @property
    def is_broken(self) -> bool:
        """True if a rank has given up."""
        return self._ranks is not None and self._ranks.rank_that_gave_up >= 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Guard work that all ranks do: if this one raises inside, the others must not wait for it."""
        try:
            yield
        except BaseException as error:
            self.give_up(f"{type(error).__name__}: {error}")
            raise

    # --- messages ---------------------------------------------------------------------------------------------------

    def post(self, command: Command) -> None:
        """Rank 0: write one message for all others. Waits for a rank that is `SLOTS` messages behind.

        A message that is longer than a slot takes several.
        """
        if self.shard.size == 1:
            return
        data = np.frombuffer(self._encoder.encode(command), np.uint8)
        room = self.layout.slot_bytes - _LENGTH_BYTES
        for start in range(0, len(data), room):
            piece = data[start : start + room]
            is_last = start + room >= len(data)
            self._check(self._joined.wait_taken(SLOTS - 1))
            slot = self._slot()
            slot[:_LENGTH_BYTES].view(np.int64)[0] = len(piece) if is_last else -len(piece)
            slot[_LENGTH_BYTES : _LENGTH_BYTES + len(piece)] = piece
            self._joined.post()
            self._num_posts += 1

    def receive(self, timeout: float) -> Command | None:
        """Other ranks: return the next message; None if none has come in time.

        Raises:
            EngineFailed: rank 0 is gone, or a rank has given up.
        """
        outcome = self._joined.wait_post(timeout)
        if outcome == _TIMEOUT:
            return None
        piece, is_last = self._take(outcome)
        pieces = [piece]
        while not is_last:
            piece, is_last = self._take(self._joined.wait_post(self._timeout))
            pieces.append(piece)
        command: Command = self._decoder.decode(b"".join(pieces))
        return command

    def _take(self, outcome: int) -> tuple[bytes, bool]:
        """Return the piece in the next slot, and whether it is a message's last."""
        self._check(outcome)
        slot = self._slot()
        length = int(slot[:_LENGTH_BYTES].view(np.int64)[0])
        data = slot[_LENGTH_BYTES : _LENGTH_BYTES + abs(length)].tobytes()
        self._joined.take()
        self._num_posts += 1
        return data, length > 0

    def _slot(self) -> np.ndarray:
        start = self.layout.ring + self._num_posts % SLOTS * self.layout.slot_bytes
        return self._bytes[start : start + self.layout.slot_bytes]

    # --- what ranks put together ------------------------------------------------------------------------------------

    @property
    def native(self) -> NativeRoom:
        """Shared memory and meeting point for a pass in native code."""
        return NativeRoom(self._joined, self._bytes.ctypes.data + self.layout.rooms, 2 * self.layout.room_bytes)

    def between(self, own: AnyArray, part: Part) -> AnyArray:
        """Gather the columns of all ranks."""
        together = self._next_room(len(own), part.total, own)
        together[:, part.start : part.stop] = own
        self.meet()
        return together

    def behind(self, own: AnyArray, part: Part) -> AnyArray:
        """Gather the columns of all ranks."""
        return self.between(own, part)

    def embeddings(self, token_ids: AnyArray, tokens: Part, lookup: Lookup) -> AnyArray:
        """Gather embeddings: each rank brings the rows of its tokens."""
        is_own = (token_ids >= tokens.start) & (token_ids < tokens.stop)
        together = self.rows(lookup(token_ids[is_own] - tokens.start), is_own, len(token_ids))
        return library_of(together).copy(together)

    def rows(self, own: AnyArray, where: AnyArray | slice, count: int) -> AnyArray:
        """Gather the rows of all ranks, each in its place."""
        together = self._next_room(count, own.shape[1], own)
        together[where] = own
        self.meet()
        return together

    def _next_room(self, rows: int, columns: int, like: AnyArray) -> AnyArray:
        """Return the other room as an array of the library and dtype of `like`."""
        self._room = 1 - self._room
        start, num_bytes = self.layout.rooms + self._room * self.layout.room_bytes, rows * columns * like.itemsize
        assert num_bytes <= self.layout.room_bytes, "a step is larger than planned"
        room: AnyArray = library_of(like).over(self._bytes[start : start + num_bytes], like).reshape(rows, columns)
        return room

    def inputs(self, count: int, dtype: str) -> npt.NDArray[Any]:
        """Return the inputs of the head, [count, hidden_size]; rank 0 writes them."""
        return self._at(self.layout.inputs, dtype, count, self.layout.hidden_size)

    def hidden(self, count: int, dtype: str) -> npt.NDArray[Any]:
        """Return the hidden states of the stage before this one, [count, hidden_size]; rank 0 writes them."""
        return self._at(self.layout.hidden, dtype, count, self.layout.hidden_size)

    def logits(self, count: int) -> npt.NDArray[np.float32]:
        """Return the logits, [count, vocab_size] float32; each rank writes its columns, rank 0 reads them."""
        return self._at(self.layout.logits, "float32", count, self.layout.vocab_size)

    def best(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return each rank's most likely tokens and logits, [ranks, count] int64 and float32; rank 0 reads them."""
        ids = self._at(self.layout.ids, "int64", self.shard.size, count)
        return ids, self._at(self.layout.values, "float32", self.shard.size, count)

    def _at(self, start: int, dtype: str, rows: int, columns: int) -> npt.NDArray[Any]:
        """Return memory as an array; bfloat16 as its bits."""
        piece = self._bytes[start : start + rows * columns * itemsize(dtype)]
        return piece.view("uint16" if dtype == "bfloat16" else dtype).reshape(rows, columns)
