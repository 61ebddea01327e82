"""`EncoderCache`: track which contents have been encoded, which requests need them, and what a step may encode.

The runner keeps the outputs; the cache decides which ones. An image or a clip of sound is encoded whole, in the step
that computes the first of its placeholders, and its output is held until the last of them is computed. Outputs without
holders stay until their room is needed, least recently used first, so that the same content is not encoded again (the
rules are those of vLLM V1).

An output that can be loaded from outside takes room, but nothing of the budget. If a load fails, the runner encodes.

Counts tokens, that is embeddings, and steps; knows no clock, and the same calls give the same choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.media import MediaSpan
from tokenmill.core.plan import StepPlan
from tokenmill.core.request import Request
from tokenmill.core.transfers import Encoded, TransferEvent
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.policies import View
from tokenmill.engine.scheduler.resources.resource import Resource

_User = tuple[str, int]  # a request, and the place of its span


@dataclass(slots=True)
class _Entry:
    """The output of one content. `used_at`: the last step in which a request came to hold it."""

    length: int
    used_at: int
    users: dict[_User, None] = field(default_factory=dict)


class NoEncoder(Resource):
    """Refuses requests with images or sound: nothing encodes them."""

    def check(self, request: Request, num_tokens: int) -> None:
        """Refuse a request with media."""
        if request.media:
            raise InvalidRequest("media cannot be encoded: this engine has no encoder (--encoder-budget)", "messages")


class EncoderCache(Resource):
    """Encoder outputs by the digest of their content.

    Attributes:
        budget: tokens that a step may encode. capacity: tokens of all outputs that are kept.
        num_used: tokens of all kept outputs, held by requests or not.
        num_encoded: tokens that were encoded since the start. num_loaded: those whose outputs came from outside.
        num_queries, num_hits: spans looked for, and those whose output was there.
        num_failed_loads: outputs that were to be loaded and were encoded instead.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.budget = config.encoder_budget
        self.capacity = config.encoder_cache_tokens
        self.num_used = 0
        self.num_encoded = self.num_loaded = self.num_queries = self.num_hits = self.num_failed_loads = 0
        self._splits = not config.disable_chunked_mm_input
        self._whole_prompts = not config.enable_chunked_prefill
        self._largest_chunk = config.largest_chunk
        self._entries: dict[str, _Entry] = {}
        self._left = self.budget
        self._computed: list[tuple[str, _User]] = []
        self._outside: dict[str, None] = {}
        self._encode: list[str] = []
        self._load: list[str] = []
        self._forget: list[str] = []

    def has_output(self, digest: str) -> bool:
        """Return True while the output of a content is kept, or has been ordered."""
        return digest in self._entries

    def apply(self, event: TransferEvent, step: int) -> None:
        """Take in which outputs can be loaded, and count those that could not after all."""
        match event:
            case Encoded(digest, True):
                self._outside[digest] = None
            case Encoded(digest, False, has_failed):
                self._outside.pop(digest, None)
                self.num_failed_loads += has_failed

    def check(self, request: Request, num_tokens: int) -> None:
        """Check that every span of a request can have its turn."""
        lengths = [span.length for span in request.media]
        needed = sum(lengths) if self._whole_prompts else max(lengths, default=0)
        if needed > min(self.budget, self.capacity):
            is_one = len(lengths) == 1 or not self._whole_prompts
            what = f"{request.media[0].noun} of {needed} tokens" if is_one else f"{needed} tokens of media"
            raise InvalidRequest(
                f"{what} cannot be encoded: a step encodes {self.budget} (--encoder-budget), "
                f"{self.capacity} are kept (--encoder-cache-tokens)",
                "messages",
            )
        if not self._splits and needed > self._largest_chunk:
            raise InvalidRequest(
                f"{request.media[0].noun} of {needed} tokens is run in one step, and a step runs "
                f"{self._largest_chunk} (--max-num-batched-tokens, --long-prefill-token-threshold)",
                "messages",
            )

    def begin_step(self, step: int, view: View) -> Iterable[Request]:
        """Restore the budget, and release the outputs that the last step has used up."""
        self._left = self.budget
        for digest, user in self._computed:
            self._entries[digest].users.pop(user, None)
        self._computed.clear()
        return ()

    def limit(self, request: Request, start: int, num_tokens: int, match: PrefixMatch | None = None) -> tuple[int, str]:
        """Return how many tokens can run until an output is needed that this step can neither encode nor keep."""
        if not request.media:
            return num_tokens, ""
        left, room, seen = self._left, self.capacity - self._num_held(), set[str]()
        for span in _touched(request.media, start, start + num_tokens):
            before = max(0, span.offset - start)
            if not self._splits and span.end > start + num_tokens:
                return before, f"needs a step with room for {span.noun} of {span.length} tokens, which is not cut"
            entry = self._entries.get(span.digest)
            if span.digest in seen or (entry is not None and entry.users):
                continue
            to_encode = span.length if entry is None and span.digest not in self._outside else 0
            if to_encode > left:
                return (
                    before,
                    f"needs the encoder for {span.length} tokens, {left} of {self.budget} are left in the step",
                )
            if span.length > room:
                return (
                    before,
                    f"needs {span.length} tokens of the encoder cache, {room} of {self.capacity} are free",
                )
            left, room = left - to_encode, room - span.length
            seen.add(span.digest)
        return num_tokens, ""

    def schedule(self, request: Request, start: int, num_tokens: int, step: int) -> None:
        """Hold the outputs that the tokens to be run need, and order the missing ones, as `limit` has allowed."""
        if not request.media:
            return
        end = start + num_tokens
        spans = _touched(request.media, start, end)
        for span in spans:
            entry, user = self._entries.get(span.digest), (request.id, span.offset)
            if entry is not None:  # before anything is evicted
                self.num_queries += user not in entry.users
                self.num_hits += user not in entry.users
                entry.users[user], entry.used_at = None, step
        for span in spans:
            user = request.id, span.offset
            if span.digest not in self._entries:
                self._order(span, step)
                self.num_queries += 1
            self._entries[span.digest].users[user] = None
            if span.end <= end:
                self._computed.append((span.digest, user))

    def release(self, request: Request, step: int) -> None:
        """Release the outputs of a request that gives up its row; they stay until their room is needed."""
        for span in request.media:
            if span.digest in self._entries:
                self._entries[span.digest].users.pop((request.id, span.offset), None)

    def plan_fields(self) -> Mapping[str, Any]:
        """Return the digests to encode and to load in the step, and those to forget before it."""
        if not (self._encode or self._load):  # outputs go only where another needs their room
            return {}
        fields = {"encode": tuple(self._encode), "load": tuple(self._load), "forget": tuple(self._forget)}
        self._encode, self._load, self._forget = [], [], []
        return fields

    def counts(self) -> Mapping[str, Any]:
        """Return how many tokens were encoded and loaded, and how many spans looked for and found."""
        return {
            "encoder_tokens": self.num_encoded,
            "encoder_loaded_tokens": self.num_loaded,
            "encoder_failed_loads": self.num_failed_loads,
            "encoder_queries": self.num_queries,
            "encoder_hits": self.num_hits,
        }

    def check_invariants(self, owners: Sequence[Request], plans: Sequence[StepPlan]) -> None:
        """Raise AssertionError if entries, users and the requests that own rows disagree."""
        assert self.num_used == sum(entry.length for entry in self._entries.values()), "tokens are off"
        assert self.num_used <= self.capacity, "more outputs than there is room for"
        known = {(request.id, span.offset) for request in owners for span in request.media}
        users = {user for entry in self._entries.values() for user in entry.users}
        assert users <= known, "an output is held for a request without a row"

    def _num_held(self) -> int:
        return sum(entry.length for entry in self._entries.values() if entry.users)

    def _order(self, span: MediaSpan, step: int) -> None:
        """Have an output made or loaded, in the room of others that nobody holds."""
        unused = sorted((entry.used_at, digest) for digest, entry in self._entries.items() if not entry.users)
        for _, digest in unused:
            if self.num_used + span.length <= self.capacity:
                break
            self.num_used -= self._entries.pop(digest).length
            self._forget.append(digest)
        assert self.num_used + span.length <= self.capacity, "`limit` has allowed it"
        self._entries[span.digest] = _Entry(span.length, step)
        self.num_used += span.length
        if span.digest in self._outside:
            self.num_loaded += span.length
            self._load.append(span.digest)
            return
        assert span.length <= self._left, "`limit` has allowed it"
        self._left -= span.length
        self.num_encoded += span.length
        self._encode.append(span.digest)


def _touched(media: Iterable[MediaSpan], start: int, end: int) -> list[MediaSpan]:
    """Return the spans with a token in [start, end)."""
    return [span for span in media if span.offset < end and span.end > start]
