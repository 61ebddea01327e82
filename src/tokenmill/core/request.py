"""A request as the scheduler sees it: token ids, three counters and a status; everything else is derived.

    |<----------- prompt ----------->|<- output ->|<- pending ->|
    |<- num_cached ->|               |            |             |
    |<- num_computed (KV written or being written) ->|
    |<- num_tokens (ids the host knows) ----------->|

Knows no torch, no sockets and no clock. `Request.move_to` alone changes a status, by the table of legal changes.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.media import MediaSpan
from tokenmill.core.pooling import PoolingParams
from tokenmill.core.sampling_params import SamplingParams

TokenArray = npt.NDArray[np.int32]


class RequestStatus(enum.Enum):
    """The states of a request; `_LEGAL` lists the changes between them."""

    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING_FOR_ADAPTER = "waiting_for_adapter"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    WAITING_FOR_ENCODER = "waiting_for_encoder"
    WAITING_FOR_INPUT = "waiting_for_input"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """The reasons why a request ends."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_S = RequestStatus
# What an event from outside ends, and where a request may begin.
WAITING_FOR_EVENT = frozenset(
    {_S.WAITING_FOR_GRAMMAR, _S.WAITING_FOR_ADAPTER, _S.WAITING_FOR_REMOTE_KV, _S.WAITING_FOR_ENCODER}
)
ARRIVING = WAITING_FOR_EVENT | {_S.WAITING}
_LEGAL: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset({_S.RUNNING, _S.WAITING_FOR_REMOTE_KV, _S.FINISHED}),
    # One that waits for several things waits for one after the other.
    **dict.fromkeys(WAITING_FOR_EVENT, ARRIVING | {_S.FINISHED}),
    _S.WAITING_FOR_INPUT: frozenset({_S.WAITING, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.WAITING_FOR_INPUT, _S.FINISHED}),
    # To WAITING_FOR_INPUT: the last step it was part of ended its turn, and it keeps the row it was about to lose.
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.WAITING_FOR_REMOTE_KV, _S.WAITING_FOR_INPUT, _S.FINISHED}),
    _S.FINISHED: frozenset(),
}


class CacheKey(NamedTuple):
    """The properties besides tokens that two requests must have in common to share KV. Made once, at arrival.

    Attributes:
        model: fingerprint of the weights and of how they and the KV are stored.
        salt: a secret of the client; without it no request shares its KV. adapter: digest of its files; "": base model.
    """

    model: str = ""
    salt: str = ""
    adapter: str = ""


_COMMON = CacheKey()


class TurnInput(msgspec.Struct, frozen=True):
    """The input with which a session continues.

    Attributes:
        is_last: the session ends with this turn. max_model_len: the most tokens of input and output of all turns.
    """

    token_ids: Sequence[int]
    params: SamplingParams
    is_last: bool
    max_model_len: int


class Proposal(NamedTuple):
    """Tokens that may follow a request's, proposed by code that runs beside the model.

    Attributes:
        token_ids: [k] int32. is_forced: its grammar leaves no other text. The model may spell that text in other
            tokens, so they are likely, not certain.
        probabilities: [k] float32, an estimate that each is right, given that those before it are; None: there is none.
    """

    token_ids: TokenArray
    is_forced: bool
    probabilities: npt.NDArray[np.float32] | None = None


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence to generate.

    Attributes:
        cache_key: decides with which requests it shares KV. adapter_name: its client's name for its adapter.
        arrival: its number in the order of arrival; the only notion of time a policy may use.
        max_tokens_total: prompt + output tokens at most; reaching it finishes the request with `length`.
        stop_token_ids: ids that end it (the model's EOS ids unless `ignore_eos`, and the client's).
        num_computed_tokens: tokens whose KV is written, or will be once the launched steps finish.
        num_pending_tokens: tokens that launched steps will sample.
        num_cached_tokens: prompt tokens that the prefix cache supplied at the (latest) admission.
        num_external_cached_tokens: those of them whose KV was loaded from elsewhere for this request.
        num_inflight_steps: launched, uncommitted steps that use its row and pages.
        awaited_page: a page of its prompt that a running request is about to compute; it waits for that request.
        has_drafts: a launched step runs draft tokens of it; the commit tells how many tokens that brings.
        media: the images of its prompt, whose placeholders are surrogates in `token_ids`.
        mask_missed: the mask of its grammar was late; it is sampled again once the launched steps are committed.
        is_background: under every policy it comes after requests that are not, and yields to them.
        is_resumable: a session, which waits for further input at the end of a turn. inputs: input that came meanwhile.
        num_reported_tokens: tokens of the prompt whose log probabilities are reported, if requested.
        num_charged_tokens: tokens that were run for its tenant or found in the cache.
        num_draft_tokens, num_accepted_tokens: draft tokens that were run for it, and those of them that were kept.
        pooling: return a vector or scores for the prompt instead of a continuation.
        proposal: tokens that may follow its own, if the step that brought the last of them proposed any.
        rank: its place in the queues: (its class: background and what the policy says, turn of its tenant, arrival).
        row: the row of the page and token tables it owns, or None.
        tenant: takes turns with others, if the policy has turns. wait_reason: why the last step left it out; or empty.
    """

    id: str
    prompt_token_ids: InitVar[Sequence[int] | TokenArray]
    params: SamplingParams
    _: KW_ONLY
    arrival: int
    max_tokens_total: int
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_key: CacheKey = _COMMON
    adapter_name: str = ""
    tenant: str = ""
    is_resumable: bool = False
    pooling: PoolingParams | None = None
    is_background: bool = False
    media: tuple[MediaSpan, ...] = ()
    status: RequestStatus = RequestStatus.WAITING

    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_reason: int | str | None = field(default=None, init=False)
    rank: tuple[tuple[int, Any], int, int] = field(init=False)
    row: int | None = field(default=None, init=False)
    inputs: deque[TurnInput] = field(default_factory=deque, init=False)
    awaited_page: Hashable | None = field(default=None, init=False)
    proposal: Proposal | None = field(default=None, init=False)
    wait_reason: str = field(default="", init=False)
    has_drafts: bool = field(default=False, init=False)
    mask_missed: bool = field(default=False, init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_pending_tokens: int = field(default=0, init=False)
    num_inflight_steps: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_external_cached_tokens: int = field(default=0, init=False)
    num_charged_tokens: int = field(default=0, init=False)
    num_reported_tokens: int = field(default=0, init=False)
    num_draft_tokens: int = field(default=0, init=False)
    num_accepted_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    _buffer: TokenArray = field(init=False)

    def __post_init__(self, prompt_token_ids: Sequence[int] | TokenArray) -> None:
        prompt, total = np.asarray(prompt_token_ids, dtype=np.int32), self.max_tokens_total
        if not 0 < len(prompt) < total:
            raise InvalidRequest(f"a prompt of {len(prompt)} tokens, and {total} tokens with its output")
        self.rank = (self.is_background, 0), 0, self.arrival
        self.num_prompt_tokens = self.num_tokens = len(prompt)
        self._buffer = np.concatenate([prompt, np.zeros(64, dtype=np.int32)])

    @property
    def token_ids(self) -> TokenArray:
        """Prompt and committed output, [num_tokens] int32, a read-only view."""
        view = self._buffer[: self.num_tokens]
        view.flags.writeable = False
        return view

    @property
    def num_output_tokens(self) -> int:
        """Number of committed output tokens."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """True while more than its newest token, known or pending, is left to run."""
        return self.num_tokens + self.num_pending_tokens - self.num_computed_tokens > 1

    @property
    def needs_whole_prompt(self) -> bool:
        """True if every token of the prompt must be run, whatever the prefix cache has."""
        return self.params.prompt_logprobs is not None or (self.pooling is not None and self.pooling.needs_whole_prompt)

    @property
    def is_running(self) -> bool:
        """True while it owns a row and makes progress."""
        return self.status is RequestStatus.RUNNING

    def is_behind(self, other: Request) -> bool:
        """Return True if its class comes after the other's: requests of that class may keep it waiting."""
        return bool(self.rank[0] > other.rank[0])

    @property
    def awaits_kv(self) -> bool:
        """True while sources are asked for KV of its prompt, or while that is being loaded."""
        return self.status is RequestStatus.WAITING_FOR_REMOTE_KV

    @property
    def awaits_step(self) -> bool:
        """True if the outcome of a launched step still matters: it has not ended or paused since the launch."""
        return self.status is _S.RUNNING or self.status is _S.PREEMPTED

    @property
    def is_paused(self) -> bool:
        """True for a session between two turns; it keeps its row and pages."""
        return self.status is RequestStatus.WAITING_FOR_INPUT

    @property
    def is_finished(self) -> bool:
        """True once its outcome is fixed, even while a launched step still uses its row and pages."""
        return self.status is RequestStatus.FINISHED

    @property
    def will_reach_length(self) -> bool:
        """True if the tokens already launched bring it to its length limit: no more must be scheduled."""
        return self.num_tokens + self.num_pending_tokens >= self.max_tokens_total

    def move_to(self, status: RequestStatus) -> None:
        """Change the status; an illegal change is a bug and raises AssertionError."""
        assert status in _LEGAL[self.status], f"request {self.id}: {self.status.value} -> {status.value} is not legal"
        self.status = status

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Fix the outcome. Row and pages stay until the last launched step that uses them is committed."""
        self.move_to(RequestStatus.FINISHED)
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.wait_reason = ""

    def resume(self, token_ids: Sequence[int]) -> None:
        """Continue behind outputs of another engine; called before its first step.

        Raises:
            InvalidRequest: the outputs leave no room for another token.
        """
        if self.num_tokens + len(token_ids) >= self.max_tokens_total:
            raise InvalidRequest(f"{len(token_ids)} output tokens already; {self.max_tokens_total} tokens in all")
        self._make_room(len(token_ids))
        self._buffer[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids
        self.num_tokens += len(token_ids)

    def append_outputs(self, token_ids: list[int], num_rejected: int = 0) -> list[int]:
        """Append the tokens that a step brought, one by one; a stop token or the last that fits ends the turn.

        Args:
            num_rejected: draft tokens of that step that the model rejected: their computed KV is void.

        Returns:
            The tokens appended; those behind the end are dropped.
        """
        self.proposal = None
        self.num_computed_tokens -= num_rejected
        self.num_pending_tokens -= num_rejected + len(token_ids)
        for number, token_id in enumerate(token_ids, 1):
            position = self.num_tokens
            if position == len(self._buffer):
                self._make_room(1)
            self._buffer[position] = token_id
            self.num_tokens = position + 1
            if token_id in self.stop_token_ids and self._may_stop:
                self._end_turn(FinishReason.STOP, token_id)
                return token_ids[:number]
            if position + 1 >= self.max_tokens_total:
                self._end_turn(FinishReason.LENGTH)
                return token_ids[:number]
        return token_ids

    @property
    def _may_stop(self) -> bool:
        # Before min_tokens a grammar lets only a stop through that nothing else can follow.
        return self.num_output_tokens > self.params.min_tokens or self.params.grammar is not None

    def resample(self) -> None:
        """Prepare to run the last known token again: a step did not sample, so later launched tokens are void."""
        self.num_computed_tokens = self.num_tokens - 1
        self.num_pending_tokens = 0
        self.mask_missed = self.num_inflight_steps > 0

    def max_tokens_with(self, turn: TurnInput) -> int:
        """Return the `max_tokens_total` of a session that goes on with this input, if its turn ended now.

        Raises:
            InvalidRequest: the input is empty, or the context has no room for it.
        """
        length = self.num_tokens - 1 + len(turn.token_ids)
        if not turn.token_ids or length >= turn.max_model_len:
            raise InvalidRequest(f"{length} tokens with this input; the context holds {turn.max_model_len}")
        return min(turn.max_model_len, length + (turn.params.max_tokens or turn.max_model_len))

    def extend(self, turn: TurnInput) -> None:
        """Continue a paused session with further input. Its computed tokens stay; the last one, never run, goes.

        |<- computed: all now prompt ->|<- last: dropped ->|
        |<- computed ----------------->|<- token_ids ----->|

        Raises:
            InvalidRequest: see `max_tokens_with`; the session is then unchanged.
        """
        self.max_tokens_total, token_ids = self.max_tokens_with(turn), turn.token_ids
        self.move_to(RequestStatus.WAITING)
        self.num_tokens -= 1
        self._make_room(len(token_ids))
        self._buffer[self.num_tokens : self.num_tokens + len(token_ids)] = token_ids
        self.num_tokens += len(token_ids)
        self.num_prompt_tokens = self.num_tokens
        self.num_cached_tokens = self.num_external_cached_tokens = 0
        self.proposal = None
        self.params = turn.params
        self.is_resumable = not turn.is_last
        self.finish_reason = self.stop_reason = None

    def _end_turn(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        if not self.is_resumable:
            self.finish(reason, stop_reason)
            return
        self.move_to(RequestStatus.WAITING_FOR_INPUT)
        self.finish_reason = reason
        self.stop_reason = stop_reason
        # A launched step may be running the last token already; it is dropped all the same, at every depth.
        self.num_computed_tokens = self.num_tokens - 1
        self.num_pending_tokens = 0

    def _make_room(self, count: int) -> None:
        """Make room in the buffer for `count` more tokens; doubling keeps appends cheap at any length."""
        if self.num_tokens + count > len(self._buffer):
            room = np.zeros(max(len(self._buffer), count), dtype=np.int32)
            self._buffer = np.concatenate([self._buffer, room])
