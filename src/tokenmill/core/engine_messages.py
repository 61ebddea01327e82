"""Messages from engines to the API process: progress of a start, state, and replies to operators.

See `messages.py` for the other messages.
"""

from __future__ import annotations

import msgspec

from tokenmill.core.adapters import AdapterRef
from tokenmill.core.histogram import Histogram
from tokenmill.core.live import LiveReport
from tokenmill.core.media import Transcription
from tokenmill.core.model_description import StoredFormat
from tokenmill.core.part_messages import EngineMessage
from tokenmill.core.pooling import PoolingInfo


class EngineProgress(EngineMessage):
    """Report the progress of a start-up phase: `done` of `total` units; `total` 0: unknown."""

    phase: str
    done: int
    total: int


class EngineReady(EngineMessage, kw_only=True):
    """Report that the engine serves, with all facts for the start-up screen and the text workers.

    `fingerprint`: of the model whose KV it is; see `CacheKey`. `takes_transfer_params`: clients may send parameters.
    `adapters`: those that it was started with; `max_loras`: the most in use at a time, 0: adapters are off.
    `kv_windows`: how pages behind sliding windows are handled; "": the model has none.
    `takes_images`: prompts may have images; `max_clip_seconds`: of a clip of sound at most, 0: prompts have none.
    `transcription`: of a model that writes down sound and does nothing else.
    `num_states`: recurrent states that there is room for, in `state_bytes`; 0: the model has none.
    `pooling`: of a model that makes vectors or scores; None: it generates. `truncate_inputs`: see `Cut`.
    """

    model: str
    architecture: str
    num_parameters: int
    dtype: str
    device: str
    kernels: str
    kernels_reason: str
    attention_backend: str
    attention_reason: str
    max_model_len: int
    vocab_size: int
    page_size: int
    num_pages: int
    kv_bytes: int
    weight_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    threads_reason: str
    seconds: dict[str, float]
    speculation: str = ""
    weights_source: str = ""
    stored: StoredFormat = StoredFormat()
    fingerprint: str = ""
    takes_transfer_params: bool = False
    takes_images: bool = False
    max_clip_seconds: float = 0.0
    transcription: Transcription | None = None
    adapters: list[AdapterRef] = msgspec.field(default_factory=list)
    max_loras: int = 0
    kv_windows: str = ""
    num_states: int = 0
    state_bytes: int = 0
    pooling: PoolingInfo | None = None
    truncate_inputs: str = "off"


class EngineStats(EngineMessage, kw_only=True):
    """Counters since start and the state now, sent a few times a second and whenever the engine becomes idle.

    Attributes:
        num_corrupted: requests that ended because the model gave no finite numbers for them.
        num_queued: those of the waiting requests that only rows, pages or budget keep from running, but
            for those in the background.
        is_stuck: True if some of them could run but no step runs: a bug that /health must show.
        waiting_by_reason: `num_waiting`, by the reason for waiting.
        step_tokens, step_seconds: sizes of the steps, and their seconds by part.
        num_drafts, num_draft_tokens, num_accepted_tokens: proposed drafts, their tokens, and those that were accepted.
        num_accepted_per_position: how often the first token of a draft was kept, the first two, and so on.
        running_adapters, waiting_adapters: names of those that requests run with and wait with.
        encoder_tokens: image tokens that were encoded. encoder_queries, encoder_hits: images that steps needed, and
            those of them that were encoded already. encoder_loaded_tokens: image tokens whose outputs came from
            elsewhere; encoder_failed_loads: outputs that were to come, and were encoded here.
        num_states_kept, num_state_hits, num_states_given_up: recurrent states that were kept of prefixes, those that
            requests began with, and those that were given up.
        prefix_partial_hits: those of the prefix hits that were copied out of pages which end otherwise.
        num_loaded_tokens, num_stored_tokens: tokens whose KV was loaded from a source, and stored in one.
        num_window_pages, num_window_pages_pinned, num_window_pages_evictable: as those above, of the window group.
        kv_lifetime, kv_idle, kv_reuse_gap: seconds of a sample of cached pages, see `PageLives`.
    """

    step: int
    num_running: int
    num_waiting: int
    num_rows_used: int
    num_pages: int
    num_pages_pinned: int
    num_pages_evictable: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generation_tokens: int
    prefix_partial_hits: int = 0
    num_corrupted: int = 0
    num_queued: int = 0
    is_stuck: bool = False
    waiting_by_reason: dict[str, int] = msgspec.field(default_factory=dict)
    step_tokens: Histogram | None = None
    step_seconds: dict[str, Histogram] = msgspec.field(default_factory=dict)
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = msgspec.field(default_factory=list)
    num_loaded_tokens: int = 0
    num_stored_tokens: int = 0
    running_adapters: list[str] = msgspec.field(default_factory=list)
    waiting_adapters: list[str] = msgspec.field(default_factory=list)
    encoder_tokens: int = 0
    encoder_queries: int = 0
    encoder_hits: int = 0
    encoder_loaded_tokens: int = 0
    encoder_failed_loads: int = 0
    num_states_kept: int = 0
    num_state_hits: int = 0
    num_states_given_up: int = 0
    num_window_pages: int = 0
    num_window_pages_pinned: int = 0
    num_window_pages_evictable: int = 0
    kv_lifetime: Histogram | None = None
    kv_idle: Histogram | None = None
    kv_reuse_gap: Histogram | None = None


class Done(EngineMessage):
    """Reply to `SetPaused`, `ResetPrefixCache` and `Sleep`: whether it succeeded."""

    id: str
    is_done: bool


class AdapterSeen(EngineMessage):
    """Reply to `LookAtAdapter`: the adapter, or why it cannot be served."""

    id: str
    adapter: AdapterRef | None
    error: str = ""


class SlotSeen(EngineMessage):
    """Reply to `ActOnSlot`: whether the action is over, and what became of it.

    `num_tokens`: saved with their KV, restored or erased. `num_bytes`: written or read. `error`: why nothing was done.
    """

    id: str
    is_done: bool = True
    num_tokens: int = 0
    num_bytes: int = 0
    error: str = ""


class RequestState(msgspec.Struct, kw_only=True):
    """The state of one request, in the words of `Request`.

    Attributes:
        wait_reason: why it was not part of the last step; empty while it runs.
        engine: the index of its engine; None: not assigned yet.
        adapter: the name of its adapter; None: it runs on the base model.
    """

    id: str
    engine: int | None = None
    status: str
    wait_reason: str
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    num_external_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    adapter: str | None = None


class RequestStates(EngineMessage):
    """Reply to `ExplainRequests`: the state of each open request."""

    id: str
    states: list[RequestState]


EngineReply = Done | RequestStates | AdapterSeen | SlotSeen | LiveReport
