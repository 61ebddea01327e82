"""Export a step log for people and other programs: a row per step, or a trace for Perfetto (ui.perfetto.dev).

The log has no time of day: its clock starts at 0 and counts only the seconds in which there was work.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from typing import IO, Any

import msgspec

from tokenmill.engine.loop.step_log import Aborted, Added, LogHeader, StepRecord

PARTS = ("schedule", "run", "commit")


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration of the engine's loop.

    Attributes:
        step: the step that it launched; None: none.
        at: seconds before it.
        schedule, run, commit: seconds of its parts; with overlap, `run` is the wait for an older step.
        requests: in the step; `admitted` of them took a row, and `sampled` of them reached their last known token.
        tokens: tokens that the step ran.
        pages: new entries of the page table.
        committed: the step that it committed, which brought `brought` tokens.
        arrived, aborted: requests, before it.
        waiting: the reason why the first of the waiting requests waited.
        error: the reason why the step that was due failed.
    """

    step: int | None
    at: float
    schedule: float
    run: float
    commit: float
    requests: int
    admitted: int
    sampled: int
    tokens: int
    pages: int
    committed: int | None
    brought: int
    arrived: int
    aborted: int
    waiting: str
    error: str


def rows(records: Iterable[StepRecord]) -> Iterator[StepRow]:
    """Yield a row for each record."""
    at = 0.0
    for record in records:
        plan: dict[str, Any] = record.plan or {}
        yield StepRow(
            step=plan.get("step"),
            at=at + record.rest,
            **dict(zip(PARTS, record.seconds, strict=True)),
            requests=len(plan.get("request_ids", ())),
            admitted=len(plan.get("new_rows", ())),
            sampled=sum(count > 0 for count in plan.get("num_samples", ())),
            tokens=sum(plan.get("num_scheduled", ())),
            pages=len(plan.get("page_ids", ())),
            committed=record.committed,
            brought=len(record.token_ids),
            arrived=sum(isinstance(one, Added) for one in record.inputs),
            aborted=sum(len(one.ids) for one in record.inputs if isinstance(one, Aborted)),
            waiting=record.waiting,
            error=record.error or "",
        )
        at += record.all_seconds


def trace_events(records: Iterable[StepRecord]) -> Iterator[dict[str, Any]]:
    """Yield Chrome's trace events for Perfetto: steps with their parts, counters, and a lane for each request."""
    kept = list(records)
    yield {"ph": "M", "pid": 1, "tid": 1, "name": "thread_name", "args": {"name": "steps"}}
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "engine"}}
    for row in rows(kept):
        start = _microseconds(row.at)
        spent = {"schedule": row.schedule, "run": row.run, "commit": row.commit}
        name = "iteration without a step" if row.step is None else f"step {row.step}"
        facts = {"requests": row.requests, "tokens": row.tokens, "brought": row.brought, "waiting": row.waiting}
        yield _slice(name, start, _microseconds(math.fsum(spent.values())), facts | {"error": row.error})
        for part, seconds in spent.items():
            yield _slice(part, start, _microseconds(seconds), {})
            start += _microseconds(seconds)
        for counter in ("requests", "tokens"):
            yield {"ph": "C", "pid": 1, "ts": _microseconds(row.at), "name": counter, "args": {counter: facts[counter]}}
    yield from _lanes(kept)


def _lanes(records: Iterable[StepRecord]) -> Iterator[dict[str, Any]]:
    """Yield for each request its wait for the first step and its time in steps, and an instant for each preemption."""
    arrived: dict[str, float] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    at = 0.0
    for record in records:
        arrived |= {one.message.id: at for one in record.inputs if isinstance(one, Added)}
        end = at + record.all_seconds
        plan: dict[str, Any] = record.plan or {}
        for new_row in plan.get("new_rows", ()):
            if new_row["request_id"] in first:
                yield _lane("n", "back after a preemption", new_row["request_id"], at)
        for request_id in plan.get("request_ids", ()):
            first.setdefault(request_id, at)
            last[request_id] = end
        at = end
    for request_id, start in arrived.items():
        running = first.get(request_id, at)
        yield _lane("b", "waits", request_id, start)
        yield _lane("e", "waits", request_id, running)
        if request_id in first:
            yield _lane("b", "runs", request_id, running)
            yield _lane("e", "runs", request_id, last[request_id])


def _lane(kind: str, name: str, request_id: str, at: float) -> dict[str, Any]:
    place = {"pid": 1, "cat": f"request {request_id}", "id": request_id}
    return {"ph": kind, "name": name, "ts": _microseconds(at), **place}


def _slice(name: str, start: float, duration: float, facts: dict[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in facts.items() if value != ""}
    return {"ph": "X", "pid": 1, "tid": 1, "name": name, "ts": start, "dur": duration, "args": known}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def write_text(stream: IO[str], header: LogHeader, records: Iterable[StepRecord]) -> None:
    """Write a line for each iteration."""
    config = header.scheduler
    print(f"{header.num_pages} pages of {header.page_size} tokens; {config.policy}, {config.admission}", file=stream)
    titles = "step", "at s", "ms", "came", "requests", "new", "tokens", "pages", "brought"
    print("".join(f"{title:>9}" for title in titles), " waiting", file=stream)
    for row in rows(records):
        step, milliseconds = "-" if row.step is None else row.step, (row.schedule + row.run + row.commit) * 1e3
        numbers = row.arrived, row.requests, row.admitted, row.tokens, row.pages, row.brought
        line = f"{step:>9}{row.at:9.3f}{milliseconds:9.2f}" + "".join(f"{number:9}" for number in numbers)
        print(f"{line}  {row.error or row.waiting}".rstrip(), file=stream)


def write_jsonl(stream: IO[str], header: LogHeader, records: Iterable[StepRecord]) -> None:
    """Write the header, then each record, as JSON."""
    for one in (header, *records):
        print(msgspec.json.encode(one).decode(), file=stream)


def write_csv(stream: IO[str], header: LogHeader, records: Iterable[StepRecord]) -> None:
    """Write the numbers of each iteration, with the names of `StepRow`."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(StepRow.__struct_fields__)
    writer.writerows(msgspec.structs.astuple(row) for row in rows(records))


def write_perfetto(stream: IO[str], header: LogHeader, records: Iterable[StepRecord]) -> None:
    """Write a JSON document of trace events."""
    json.dump({"displayTimeUnit": "ms", "traceEvents": list(trace_events(records))}, stream)
    print(file=stream)


WRITERS = {"text": write_text, "jsonl": write_jsonl, "csv": write_csv, "perfetto": write_perfetto}
