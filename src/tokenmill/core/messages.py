"""Every message that crosses a process boundary: msgspec tagged structs in msgpack, never pickle.

    API --(GenerateText, AbortRequests, AnswerNow, EncodeText, DecodeTokens, FindParsers)--> text worker
    text worker --(AddRequest, ContinueRequest, AbortRequests)--> engine
    text worker --(WatchEngine)--> engine --(EngineReport)--> text worker, where there are several engines
    API --(EngineLost, EngineBack, EngineDraining)--> text workers --(EngineIdle)--> API, where engines come and go
    API --(Retrial)--> text worker --(Cleared)--> API, where its predecessor has died
    API --(LeaveWorker)--> engine, where a text worker has died
    engine --(StepOutputs)--> text worker --(TextOutputs, RequestRejected, Encoded, Decoded, Cleared)--> API
    text worker --(ParsersFound)--> API, once at the start
    engine --(EngineProgress, EngineReady, EngineStats)--> API --(EngineReady)--> text workers
    API --(SetPaused, ResetPrefixCache, Sleep, ExplainRequests)--> engine --(Done, RequestStates)--> API
    API --(ShowTurns)--> engine --(LiveReport)--> API, while a client watches
    API --(Ping)--> engine, text workers --(Beat, Pong, PartFailed)--> API
    first API process <--(`api_messages.py`)--> its API workers, where there are any

A text worker chooses the engine of a request. An abort takes the same path as its request, so it never overtakes it.
Ids are random and internal: a client's own id is a label that stays in the API process.
A restarted part has a new inbox; by its name, messages that the dead part had left in flight are known and dropped.
"""

from __future__ import annotations

from typing import Any, Self

import msgspec

from tokenmill.core.adapters import AdapterRef
from tokenmill.core.answer import AnswerPiece
from tokenmill.core.api_messages import ForSibling, FromSibling, PrefixChange
from tokenmill.core.engine_messages import EngineProgress, EngineReady, EngineReply, EngineStats
from tokenmill.core.errors import Refusal
from tokenmill.core.infill import Infill
from tokenmill.core.live import ShowTurns
from tokenmill.core.media import MediaInput
from tokenmill.core.part_messages import (
    EngineNews,
    EngineReport,
    FromPart,
    LeaveWorker,
    Message,
    Ping,
    Retrial,
    WatchEngine,
)
from tokenmill.core.plan import TokenLogprobs
from tokenmill.core.pooling import PooledTexts, PoolingParams
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.text_queries import TextQuery, TextReply

# --- API -> text worker -------------------------------------------------------------------------------------------


class CallRules(msgspec.Struct):
    """Rules for tool calls in an answer: notation, functions, whether one is required and several may be made.

    Attributes:
        is_lazy: the model decides whether to call, and a grammar keeps its calls to the schemas.
    """

    parser: str
    names: list[str]
    is_required: bool
    is_parallel: bool
    is_lazy: bool = False


class GenerateText(Message, kw_only=True):
    """Encode a prompt and start `len(ids)` requests with it: exactly one of `text`, `token_ids`, `messages`, `infill`.
    Or take all prompts of a call whose answers are vectors or scores, `texts`, each of which is one request.

    Attributes:
        infill: a gap to fill between two texts.
        calls: the rules for calls of the `tools`; None: no grammar enforces them.
        reasoning: the parser of the model's thinking, a value of `--reasoning-parser`; "": thinking is not parsed.
        end_of_thinking: the text that ends thinking whose budget is used up, before its mark.
        truncate_prompt_tokens: keep this many tokens at the prompt's end; -1: as many as leave room for the output.
        add_special_tokens: add those of the tokenizer around the prompt; None: around texts, not around chats.
        tenant: the client, or single call, that takes turns with other tenants for the engine.
        wants_prompt: the first output comes with a `PromptReport`.
        wants_progress: outputs tell how far the prompt is computed, until the first token of the first continuation.
        needs_no_output: its one sampled token is not used: the prompt may be as long as the context.
        pooling: return a vector or scores for the prompt, not a continuation.
        engine: the engine that must run the requests; None: the text worker chooses.
        session: calls of one session go to the same engine while it lives; empty: no session.
        conversation: whose prompts are compared with their last ones; empty: this one is not.
        volatile: the names of the rules that moved or dropped blocks of its `messages`; see `volatile_blocks`.
        is_background: it runs beside requests of waiting clients, never before one.
        kv_transfer_params: the client's parameters for the sources of KV.
        adapter: the LoRA adapter to apply; None: the base model.
        num_estimated: estimated tokens of the prompt; None: no estimate yet.
        deadline: when its call is given up, in seconds of a monotonic clock; 0: never. Engines only show it.
        forced_text: the only text that the answer may be; "": any. Outputs and calls then add no grammar.
        resumed: set if the text worker that had the call has died: the tokens of each delta already sent to the
            client, by the ids of the requests that are still open.
    """

    ids: list[str]
    params: SamplingParams
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    infill: Infill | None = None
    texts: PooledTexts | None = None
    tools: list[dict[str, Any]] | None = None
    calls: CallRules | None = None
    reasoning: str = ""
    end_of_thinking: str = ""
    template_kwargs: dict[str, Any] = {}
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    wants_prompt: bool = False
    wants_progress: bool = False
    needs_no_output: bool = False
    pooling: PoolingParams | None = None
    engine: int | None = None
    session: str = ""
    conversation: str = ""
    volatile: list[str] = []
    is_background: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    adapter: AdapterRef | None = None
    num_estimated: int | None = None
    deadline: float = 0.0
    forced_text: str = ""
    resumed: dict[str, list[list[int]]] | None = None

    @property
    def num_requests(self) -> int:
        """Number of requests that it starts."""
        return self.params.n if self.texts is None else len(self.texts.inputs)


class AbortRequests(Message):
    """End these requests. Unknown ids are ignored: the request may have just finished."""

    ids: list[str]


class AnswerNow(Message):
    """End the thinking of these requests at once; those that do not think, or are not encoded yet, go on as they do."""

    ids: list[str]


# --- text worker -> engine ----------------------------------------------------------------------------------------


class AddRequest(Message, kw_only=True):
    """One request to run. `params.max_tokens` may be None; the engine caps it by the context.

    Attributes:
        media: its images, whose placeholders in the prompt are surrogates; see `core/media.py`.
        output_token_ids: its output so far, from an engine that died; it goes on behind it.
        wants_progress: outputs tell how far its prompt is computed, until its first token.
        needs_no_output, deadline: see `GenerateText`.
        worker: the inbox of the text worker that its outputs go to.
        num_missing_tokens: prompt tokens without KV in the engine when it was chosen, as far as was known; 0: all.
        kv_transfer_params: the client's parameters for the sources of KV, which alone read them.
        adapter: the LoRA adapter to apply; None: the base model.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    output_token_ids: list[int] = []
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    is_resumable: bool = False
    worker: str = ""
    wants_progress: bool = False
    needs_no_output: bool = False
    pooling: PoolingParams | None = None
    engine: int | None = None
    session: str = ""
    num_missing_tokens: int = 0
    is_background: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    adapter: AdapterRef | None = None
    media: list[MediaInput] = []
    deadline: float = 0.0


class ContinueRequest(Message):
    """Go on with a running request under other parameters; the engine alone knows its newest tokens."""

    request: AddRequest


# --- API -> engine ------------------------------------------------------------------------------------------------


class SetPaused(Message):
    """Stop launching steps, or go on; answered with `Done` once no step runs."""

    id: str
    is_paused: bool


class ResetPrefixCache(Message):
    """Forget cached prefixes; answered with `Done`, false if running requests hold pages.

    Attributes:
        preempt_running: send running requests back to the queue first.
        reset_external: also forget the pages stored outside the cache, in memory or on disk.
    """

    id: str
    preempt_running: bool
    reset_external: bool = False


class Sleep(Message):
    """Give memory back until it is used again; answered with `Done`, false if requests are open or it cannot be."""

    id: str


class LookAtAdapter(Message):
    """Read an adapter; answered with `AdapterSeen`."""

    id: str
    name: str
    path: str


class ActOnSlot(Message):
    """Save the conversation of a slot to a file, restore one from there, or erase it; answered with `SlotSeen`.

    Attributes:
        action: save, restore or erase.
        file: the name of a file in the folder of the server; "" to erase.
        ticket: of this action. Another message with the same one asks what has become of it.
    """

    id: str
    slot: int
    action: str
    file: str
    ticket: str


class ExplainRequests(Message):
    """Ask for the state of requests; answered with `RequestStates`."""

    id: str
    request_ids: list[str]


# --- engine -> text worker ----------------------------------------------------------------------------------------


class PromptProgress(msgspec.Struct, array_like=True):
    """The part of a prompt that is computed, cached tokens included; `seconds_left` None: nothing is known yet."""

    num_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int
    seconds_left: float | None = None


class TokenOutput(msgspec.Struct, array_like=True):
    """The output of one step for one request. An `error_status` below 500 says that the request itself is at fault.

    `progress`: that of its prompt, in an output without tokens; see `AddRequest.wants_progress`.
    """

    id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    error_status: int = 500
    prompt_logprobs: list[TokenLogprobs] | None = None
    embedding: bytes | None = None
    scheduled_at: float = 0.0
    kv_transfer_params: dict[str, Any] | None = None
    progress: PromptProgress | None = None
    num_external_cached_tokens: int = 0

    @classmethod
    def refusal(cls, request_id: str, error: Refusal) -> Self:
        """Return the terminal output of a request that cannot be served."""
        return cls(request_id, [], FinishReason.ERROR, error=str(error), error_status=error.status)


class StepOutputs(Message):
    """The outputs of one step for one text worker. `source`: the inbox of the engine."""

    step: int
    outputs: list[TokenOutput]
    source: str = ""


# --- text worker -> API -------------------------------------------------------------------------------------------


class PromptReport(msgspec.Struct, array_like=True):
    """The prompt of a request as the model had it. `logprobs` begin with its second token."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


class TextOutput(msgspec.Struct, array_like=True):
    """The text that a step added to the answer of one request; the last one carries the finish reason.

    The first one carries the `prompt`, if requested, and the `change` that broke its cached prefix, if one did;
    `embedding`: a vector of float32, little-endian; `progress`: its prompt's, in a delta that brings nothing else.
    `answer` is set instead of `text` if the answer is split into its parts, see `GenerateText.calls` and `reasoning`.
    `num_reasoning_tokens`: its tokens so far that are thinking; `num_external_cached_tokens`: those cached elsewhere.
    `token_bytes` spells the tokens that `logprobs` names: token id -> its bytes, perhaps only part of a character.
    """

    id: str
    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    token_bytes: dict[int, bytes] | None = None
    prompt: PromptReport | None = None
    embedding: bytes | None = None
    scheduled_at: float = 0.0
    answer: list[AnswerPiece] | None = None
    num_reasoning_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    change: PrefixChange | None = None
    progress: PromptProgress | None = None
    num_external_cached_tokens: int = 0


class TextOutputs(Message):
    """All deltas of one step. `source`: the inbox of the text worker."""

    outputs: list[TextOutput]
    source: str = ""


class RequestRejected(Message, kw_only=True):
    """The only reply to a message from the API whose input cannot be encoded or served."""

    ids: list[str]
    status: int
    error: str
    param: str | None = None
    code: str | None = None


TextMessage = GenerateText | AbortRequests | TextQuery | StepOutputs | EngineReady | EngineNews
ToWorker = TextMessage | AnswerNow | EngineReport | Ping | Retrial
EngineControl = SetPaused | ResetPrefixCache | Sleep | ExplainRequests | LookAtAdapter | ActOnSlot | ShowTurns
ToEngine = AddRequest | ContinueRequest | AbortRequests | LeaveWorker | EngineControl | Ping
ToReporter = ToEngine | WatchEngine
FromWorker = TextOutputs | RequestRejected | TextReply
ToApi = FromWorker | FromPart | EngineReply | EngineProgress | EngineReady | EngineStats | FromSibling
ToSibling = FromWorker | EngineReady | EngineStats | EngineNews | ForSibling
