"""Make the live report for viewers from what the step log keeps anyway: only on request, and bounded in size.

A report is made between two steps; the API process asks for it four times a second, however many viewers there are.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter

import numpy as np

from tokenmill.core.live import MOST_TURNS, LiveNode, LiveReport, LiveRequest, LiveTurn, ShowTurns
from tokenmill.core.plan import StepPlan
from tokenmill.core.request import Request
from tokenmill.engine.loop.lifetimes import Lifetime, Lifetimes
from tokenmill.engine.loop.step_log import Iteration
from tokenmill.engine.scheduler.scheduler import EngineScheduler

MOST_REQUESTS = 512
MOST_NODES = 1024
MOST_PREFIX_TOKENS = 100
NO_ROW = -1
NO_NODE = -1


def live_report(
    asked: ShowTurns, kept: Sequence[Iteration], scheduler: EngineScheduler, lifetimes: Lifetimes
) -> LiveReport:
    """Answer `asked` from the kept iterations, the current state and the times of requests."""
    first = bisect_right(kept, asked.since, key=attrgetter("number"))
    iterations = kept[first : first + MOST_TURNS]
    report = LiveReport(
        id=asked.id,
        now=time.perf_counter(),
        num_turns=iterations[-1].number if iterations else asked.since,
        turns=[_shown(iteration) for iteration in iterations],
        num_requests=len(scheduler.requests),
    )
    if kept:
        report.kept_since = kept[0].news.at
        report.owners = lifetimes.owners(report.kept_since)
    if asked.shows_requests:
        report.requests = _requests(scheduler, lifetimes)
    if asked.shows_tree:
        report.tree = _tree(scheduler)
    if asked.prefix != NO_NODE:
        nodes = scheduler.kv.cache.nodes(MOST_NODES)[:MOST_NODES]
        found = (node.tokens[:MOST_PREFIX_TOKENS].tolist() for node in nodes if node.serial == asked.prefix)
        report.prefix = next(found, [])
    return report


def _shown(iteration: Iteration) -> LiveTurn:
    plan, record, news = iteration.plan, iteration.record, iteration.news
    schedule, run, commit = record.seconds
    shown = LiveTurn(
        number=iteration.number,
        at=news.at,
        schedule=schedule,
        run=run,
        commit=commit,
        num_brought=len(record.token_ids),
        waiting=record.waiting,
        error=record.error or "",
        preempted=news.preempted,
        arrived=news.arrived,
        ended=news.ended,
        first=news.first,
    )
    if plan is not None:
        _add_plan(shown, plan)
    return shown


def _add_plan(shown: LiveTurn, plan: StepPlan) -> None:
    ids = plan.request_ids
    shown.step = plan.step
    shown.num_requests = len(ids)
    shown.num_new_pages = len(plan.page_ids)
    if not plan.new_rows and plan.draft_ids is None and plan.num_tokens == len(ids):
        # Decodes only, as most steps are.
        shown.num_decode_tokens = len(ids)
        return
    admitted = {new.request_id: new for new in plan.new_rows}
    drafts = np.maximum(plan.num_samples - 1, 0)
    own = plan.num_scheduled - drafts
    is_chunk = own > 1
    if admitted:
        is_chunk |= np.fromiter((request_id in admitted for request_id in ids), bool, len(ids))
    chunks = np.flatnonzero(is_chunk).tolist()
    starts = {ids[index]: int(plan.num_computed[index]) for index in chunks}
    shown.num_draft_tokens = int(drafts.sum())
    shown.num_prefill_tokens = int(own[is_chunk].sum())
    shown.num_decode_tokens = int(own.sum()) - shown.num_prefill_tokens
    shown.chunks = [(ids[index], int(own[index])) for index in chunks]
    shown.admitted = [(id, new.row, new.num_prompt_tokens, starts[id]) for id, new in admitted.items()]


def _requests(scheduler: EngineScheduler, lifetimes: Lifetimes) -> list[LiveRequest]:
    """Return the requests that own rows, by row, then the rest in order; at most `MOST_REQUESTS`."""
    requests: Mapping[str, Request] = scheduler.requests
    owners = sorted((one for one in requests.values() if one.row is not None), key=_row)
    others = (one for one in requests.values() if one.row is None)
    return [_request(one, lifetimes.of(one.id)) for one in islice(chain(owners, others), MOST_REQUESTS)]


def _request(request: Request, lifetime: Lifetime) -> LiveRequest:
    return LiveRequest(
        request.id,
        request.status.value,
        _row(request),
        request.wait_reason or ("" if request.is_running or request.is_finished else "waiting for its iteration"),
        request.num_prompt_tokens,
        request.num_output_tokens,
        request.num_computed_tokens,
        request.num_cached_tokens,
        request.num_preemptions,
        lifetime.arrived_at,
        lifetime.row_at,
        lifetime.first_at,
        request.max_tokens_total - request.num_tokens,
        lifetime.deadline,
    )


def _row(request: Request) -> int:
    return NO_ROW if request.row is None else request.row


def _tree(scheduler: EngineScheduler) -> list[LiveNode]:
    nodes = scheduler.kv.cache.nodes(MOST_NODES)[:MOST_NODES]
    page_size, step = scheduler.kv.page_size, scheduler.step
    numbers = {node.serial for node in nodes}
    return [
        LiveNode(
            node.serial,
            node.parent.serial if node.parent is not None and node.parent.serial in numbers else NO_NODE,
            node.num_pages * page_size,
            node.locks,
            step - node.last_used,
        )
        for node in nodes
    ]
