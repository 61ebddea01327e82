"""Gather the counters of an engine and its state, as the API process shows and exports them. Counts nothing itself."""

from __future__ import annotations

from tokenmill.core.engine_messages import EngineStats
from tokenmill.engine.loop.observer import StepStats
from tokenmill.engine.scheduler.scheduler import Scheduler


def engine_stats(scheduler: Scheduler, steps: StepStats, is_stuck: bool) -> EngineStats:
    """Return counters since start, and the state now.

    Args:
        is_stuck: requests could go on, and none does.
    """
    kv, drafts, transfers, windows = scheduler.kv, scheduler.draft_counts, scheduler.transfers, scheduler.kv.windows
    return EngineStats(
        step=scheduler.step,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_queued=scheduler.num_queued,
        is_stuck=is_stuck,
        waiting_by_reason=scheduler.waiting_by_reason(),
        step_tokens=steps.step_tokens,
        step_seconds=steps.step_seconds,
        num_rows_used=scheduler.num_rows_used,
        num_pages=kv.pool.num_usable,
        num_pages_pinned=kv.num_pinned,
        num_pages_evictable=kv.cache.num_evictable,
        num_preemptions=scheduler.num_preemptions,
        num_corrupted=scheduler.num_corrupted,
        prefix_queries=kv.num_queried_tokens,
        prefix_hits=kv.num_hit_tokens,
        prompt_tokens=steps.prompt_tokens,
        generation_tokens=steps.generation_tokens,
        num_drafts=drafts.num_drafts,
        num_draft_tokens=drafts.num_draft_tokens,
        num_accepted_tokens=sum(drafts.accepted_per_position),
        num_accepted_per_position=list(drafts.accepted_per_position),
        running_adapters=_adapters(scheduler, is_running=True),
        waiting_adapters=_adapters(scheduler, is_running=False),
        encoder_tokens=scheduler.encoder.counts.num_tokens,
        encoder_queries=scheduler.encoder.counts.num_queries,
        encoder_hits=scheduler.encoder.counts.num_hits,
        num_states_kept=scheduler.state_counts.num_kept,
        num_state_hits=scheduler.state_counts.num_hits,
        num_states_given_up=scheduler.state_counts.num_given_up,
        num_loaded_tokens=0 if transfers is None else transfers.num_loaded_tokens,
        num_stored_tokens=0 if transfers is None else transfers.num_stored_tokens,
        num_window_pages=0 if windows is None else windows.pool.num_usable,
        num_window_pages_pinned=0 if windows is None else windows.num_pinned,
        num_window_pages_evictable=0 if windows is None else windows.num_evictable,
    )


def _adapters(scheduler: Scheduler, is_running: bool) -> list[str]:
    """Return the names of the adapters of running requests, or of waiting ones."""
    requests = scheduler.requests.values()
    return sorted({one.adapter_name for one in requests if one.adapter_name and one.is_running == is_running})
