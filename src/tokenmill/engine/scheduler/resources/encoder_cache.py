"""`EncoderCache`: track which contents have been encoded, which requests need them, and what a step may encode.

The runner keeps the outputs; the cache decides which ones. An image is encoded whole, in the step that computes the
first of its placeholders, and its output is held until the last of them is computed. Outputs without holders stay until
their room is needed, least recently used first, so that the same image is not encoded again (the rules are those of
vLLM V1).

Counts tokens, that is embeddings, and steps; knows no clock, and the same calls give the same choices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.media import MediaSpan
from tokenmill.core.request import Request

_User = tuple[str, int]  # a request, and the place of its span


@dataclass(slots=True)
class _Entry:
    """The output of one content. `used_at`: the last step in which a request came to hold it."""

    length: int
    used_at: int
    users: dict[_User, None] = field(default_factory=dict)


@dataclass(slots=True)
class EncoderCounts:
    """Counts since the start: encoded tokens, spans looked for, and spans whose output was there."""

    num_tokens: int = 0
    num_queries: int = 0
    num_hits: int = 0


class EncoderCache:
    """Encoder outputs by the digest of their content.

    Args:
        budget: tokens that a step may encode. capacity: tokens of all outputs that are kept.
        splits: a step may end within a span.

    Attributes:
        num_used: tokens of all kept outputs, held by requests or not.
    """

    def __init__(self, budget: int, capacity: int, splits: bool = True) -> None:
        self.budget = budget
        self.capacity = capacity
        self.splits = splits
        self.counts = EncoderCounts()
        self.num_used = 0
        self._entries: dict[str, _Entry] = {}
        self._left = budget
        self._computed: list[tuple[str, _User]] = []
        self._encode: list[str] = []
        self._forget: list[str] = []

    def check(self, media: Iterable[MediaSpan], step_tokens: int, whole_prompts: bool) -> None:
        """Check that every span of a request can have its turn.

        Args:
            step_tokens: most tokens of one request in a step. whole_prompts: a prompt is never cut.

        Raises:
            InvalidRequest: a span cannot; says what it takes, and what there is.
        """
        lengths = [span.length for span in media]
        needed = sum(lengths) if whole_prompts else max(lengths, default=0)
        if needed > min(self.budget, self.capacity):
            what = (
                f"an image of {needed} tokens" if len(lengths) == 1 or not whole_prompts else f"{needed} image tokens"
            )
            raise InvalidRequest(
                f"{what} cannot be encoded: a step encodes {self.budget} (--encoder-budget), "
                f"{self.capacity} are kept (--encoder-cache-tokens)",
                "messages",
            )
        if not self.splits and needed > step_tokens:
            raise InvalidRequest(
                f"an image of {needed} tokens is not cut (--disable-chunked-mm-input), and a step runs {step_tokens}",
                "messages",
            )

    def begin(self) -> None:
        """Begin a step: restore the budget, and release the outputs that the last step has used up."""
        self._left = self.budget
        for digest, user in self._computed:
            self._entries[digest].users.pop(user, None)
        self._computed.clear()

    def limit(self, request: Request, start: int, num_tokens: int) -> tuple[int, str]:
        """Return how many of `num_tokens` tokens from `start` on can run in this step, and why not the rest."""
        left, room, seen = self._left, self.capacity - self._num_held(), set[str]()
        for span in _touched(request.media, start, start + num_tokens):
            before = max(0, span.offset - start)
            if not self.splits and span.end > start + num_tokens and start <= span.offset:
                return before, f"needs a step with room for its image of {span.length} tokens, which is not cut"
            entry = self._entries.get(span.digest)
            if span.digest in seen or (entry is not None and entry.users):
                continue
            if entry is None and span.length > left:
                return (
                    before,
                    f"needs the encoder for {span.length} tokens, {left} of {self.budget} are left in the step",
                )
            if span.length > room:
                return (
                    before,
                    f"needs {span.length} tokens of the encoder cache, {room} of {self.capacity} are not held",
                )
            left, room = left - (span.length if entry is None else 0), room - span.length
            seen.add(span.digest)
        return num_tokens, ""

    def take(self, request: Request, start: int, num_tokens: int, step: int) -> None:
        """Hold the outputs that the tokens to be run need, and order the missing ones, as `limit` has allowed."""
        end = start + num_tokens
        spans = _touched(request.media, start, end)
        for span in spans:
            entry, user = self._entries.get(span.digest), (request.id, span.offset)
            if entry is not None:  # before anything is evicted
                self.counts.num_queries += user not in entry.users
                self.counts.num_hits += user not in entry.users
                entry.users[user], entry.used_at = None, step
        for span in spans:
            user = request.id, span.offset
            if span.digest not in self._entries:
                self._encode_span(span, step)
                self.counts.num_queries += 1
            self._entries[span.digest].users[user] = None
            if span.end <= end:
                self._computed.append((span.digest, user))

    def leave(self, request: Request) -> None:
        """Release the outputs of a request that gives up its row; they stay until their room is needed."""
        for span in request.media:
            if span.digest in self._entries:
                self._entries[span.digest].users.pop((request.id, span.offset), None)

    def take_orders(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return what the step must encode and what to forget before it does, each once."""
        orders = tuple(self._encode), tuple(self._forget)
        self._encode.clear()
        self._forget.clear()
        return orders

    def check_invariants(self, owners: Iterable[Request]) -> None:
        """Raise AssertionError if entries, users and the requests that own rows disagree."""
        assert self.num_used == sum(entry.length for entry in self._entries.values()), "tokens are off"
        assert self.num_used <= max(self.capacity, 0), "more outputs than there is room for"
        known = {(request.id, span.offset) for request in owners for span in request.media}
        users = {user for entry in self._entries.values() for user in entry.users}
        assert users <= known, "an output is held for a request without a row"

    def _num_held(self) -> int:
        return sum(entry.length for entry in self._entries.values() if entry.users)

    def _encode_span(self, span: MediaSpan, step: int) -> None:
        unused = sorted((entry.used_at, digest) for digest, entry in self._entries.items() if not entry.users)
        for _, digest in unused:
            if self.num_used + span.length <= self.capacity:
                break
            self.num_used -= self._entries.pop(digest).length
            self._forget.append(digest)
        assert self.num_used + span.length <= self.capacity and span.length <= self._left, "`limit` has allowed it"
        self._entries[span.digest] = _Entry(span.length, step)
        self.num_used += span.length
        self._left -= span.length
        self.counts.num_tokens += span.length
        self._encode.append(span.digest)


def _touched(media: Iterable[MediaSpan], start: int, end: int) -> list[MediaSpan]:
    """Return the spans with a token in [start, end)."""
    return [span for span in media if span.offset < end and span.end > start]
