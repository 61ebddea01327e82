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
    drafts = scheduler.draft_counts
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
        num_preemptions=scheduler.num_preemptions,
        num_corrupted=scheduler.num_corrupted,
        prompt_tokens=steps.prompt_tokens,
        generation_tokens=steps.generation_tokens,
        num_drafts=drafts.num_drafts,
        num_draft_tokens=drafts.num_draft_tokens,
        num_accepted_tokens=sum(drafts.accepted_per_position),
        num_accepted_per_position=list(drafts.accepted_per_position),
        running_adapters=_adapters(scheduler, is_running=True),
        waiting_adapters=_adapters(scheduler, is_running=False),
        **scheduler.counts(),
    )


def _adapters(scheduler: Scheduler, is_running: bool) -> list[str]:
    """Return the names of the adapters of running requests, or of waiting ones."""
    requests = scheduler.requests.values()
    return sorted({one.adapter_name for one in requests if one.adapter_name and one.is_running == is_running})
