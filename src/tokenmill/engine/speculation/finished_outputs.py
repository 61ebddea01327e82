"""`FinishedOutputs`: keep the outputs of ended requests, for requests that repeat them. Bounded, oldest out first."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenmill.core.request import TokenArray

# The hash of a context t_0 .. t_n is t_0 * _BASE^n + ... + t_n, its low bits; its high bits number a bucket.
_HASH_BITS = 30
_BASE = 0x2545F491
# Stands where no output does: behind one, and where one was.
_NO_TOKEN = -1
# So many places of a chain are looked at, whatever hangs on it.
MAX_LINKS = 16


class _Chains:
    """Hash chains for one context length, as in LZ77 compressors (deflate, RFC 1951, section 4).

    Attributes:
        length: length of the contexts, in tokens.
        heads: of each bucket the newest place, or -1, [buckets] int32.
        links: for each place the one before it in its bucket, or -1, [room] int32.
    """

    __slots__ = ("heads", "length", "links", "shift")

    def __init__(self, length: int, room: int) -> None:
        bits = max(room - 1, 1).bit_length()
        self.length = length
        self.shift = max(_HASH_BITS - bits, 0)
        self.heads = array("i", [-1]) * (1 << min(bits, _HASH_BITS))
        self.links = array("i", [-1]) * room

    def newest(self, context: Sequence[int]) -> int:
        """Return the newest place in the bucket of a context, or -1."""
        value = 0
        for token_id in context:
            value = (value * _BASE + token_id) & 0xFFFFFFFF
        return self.heads[(value & ((1 << _HASH_BITS) - 1)) >> self.shift]

    def put(self, start: int, token_ids: TokenArray) -> None:
        """Link the places of an output that begins at `start`, if they have a context before and a token behind."""
        count = len(token_ids) - self.length
        if count <= 0:
            return
        values = np.zeros(count, dtype=np.uint32)
        for offset in range(self.length):
            values = values * np.uint32(_BASE) + token_ids[offset : offset + count].astype(np.uint32)
        buckets = (values & np.uint32((1 << _HASH_BITS) - 1)) >> np.uint32(self.shift)
        self._link(buckets.astype(np.int64), np.arange(start + self.length, start + len(token_ids)))

    def _link(self, buckets: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> None:
        """Put ascending places on the chains of their buckets, as if one by one."""
        heads, links = np.frombuffer(self.heads, dtype=np.int32), np.frombuffer(self.links, dtype=np.int32)
        order = np.sort(buckets << 32 | places)
        buckets, places = order >> 32, order & 0xFFFFFFFF
        changes = buckets[1:] != buckets[:-1]
        is_first, is_last = np.concatenate([[True], changes]), np.concatenate([changes, [True]])
        links[places[1:]] = places[:-1]
        links[places[is_first]] = heads[buckets[is_first]]
        heads[buckets[is_last]] = places[is_last]


class FinishedOutputs:
    """A ring of tokens, and the places behind equal contexts. An output lies in one piece, `_NO_TOKEN` behind it.

        | output 4 |-| output 5 |-| free | output 2 |-| output 3 |-| rest |
                                  ^ end    ^ oldest: goes first

    Removed outputs are overwritten with `_NO_TOKEN`, which equals no context, so links to them are met and passed.
    Searches along a chain compare tokens, so a collision costs time only. The memory is taken with the first output:
    a token of room takes 4 bytes, and 8 to 12 for each context length.
    """

    def __init__(self, max_requests: int, max_tokens: int, lengths: Sequence[int]) -> None:
        self.tokens = array("i")
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._lengths = lengths
        self._chains: list[_Chains] = []
        self._outputs: deque[tuple[int, int]] = deque()
        self._end = 0

    @property
    def num_outputs(self) -> int:
        """Number of outputs that are kept: the last ones added."""
        return len(self._outputs)

    def add(self, token_ids: TokenArray) -> None:
        """Add an output, [n], or its end if it is larger than the room. The oldest ones in the way are dropped."""
        token_ids = token_ids[max(len(token_ids) + 1 - self._max_tokens, 0) :]
        if len(token_ids) < 2 or not self._max_requests:
            return
        if not self._chains:
            self.tokens = array("i", [_NO_TOKEN]) * self._max_tokens
            self._chains = [_Chains(length, self._max_tokens) for length in self._lengths]
        start = self._make_room(len(token_ids) + 1)
        self._end = start + len(token_ids) + 1
        self._outputs.append((start, self._end))
        np.frombuffer(self.tokens, dtype=np.int32)[start : self._end - 1] = token_ids
        for chains in self._chains:
            chains.put(start, token_ids)

    def _make_room(self, count: int) -> int:
        """Free `count` places in one piece, the last of them `_NO_TOKEN`; return where they begin."""
        start, outputs = self._end, self._outputs
        if start + count > self._max_tokens:
            while outputs and outputs[0][0] >= start:
                self._drop_oldest()
            start = 0
        while outputs and start <= outputs[0][0] < start + count:
            self._drop_oldest()
        if len(outputs) == self._max_requests:
            self._drop_oldest()
        return start

    def _drop_oldest(self) -> None:
        start, end = self._outputs.popleft()
        np.frombuffer(self.tokens, dtype=np.int32)[start:end] = _NO_TOKEN

    def longest_context(self, end: list[int], at_least: int, limit: int) -> tuple[int, list[int]]:
        """Find the longest context, of `at_least` tokens or more, that stands in an output, and the places behind it.

        Args:
            end: the last tokens of a text.
            at_least: fewer equal tokens do not count.

        Returns:
            The length, and at most `limit` places, newest first; 0 and no places if no context does.
        """
        if self._outputs:
            for chains in reversed(self._chains):
                length = max(chains.length, at_least)
                if length <= len(end) and (places := self._places(chains, end[-length:], limit)):
                    return length, places
                if chains.length <= at_least:
                    break
        return 0, []

    def _places(self, chains: _Chains, context: list[int], limit: int) -> list[int]:
        tokens, links, room, length = self.tokens, chains.links, self._max_tokens, len(context)
        wanted, first = array("i", context), context[0]
        found: list[int] = []
        place, newer = chains.newest(context[-chains.length :]), -1
        for _ in range(MAX_LINKS):
            # What was written over is linked still, but to places of any age: there the chain ends.
            if place < 0 or (age := (self._end - place) % room) <= newer:
                break
            # A link from what has left may lead to where an output ends now: nothing follows there.
            if tokens[place - length] == first and tokens[place - length : place] == wanted and tokens[place] >= 0:
                found.append(place)
                if len(found) == limit:
                    break
            newer = age
            place = links[place]
        return found

    def copy_from(self, place: int, count: int) -> list[int]:
        """Return at most `count` tokens from a place on; fewer where the output ends."""
        found = self.tokens[place : place + count].tolist()
        return found[: found.index(_NO_TOKEN)] if _NO_TOKEN in found else found
