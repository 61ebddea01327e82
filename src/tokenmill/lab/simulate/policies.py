"""Run the requests of a step log under other policies: the real scheduler on a clock of its own.

Requests arrive at their recorded times, as far as a log tells: it has the seconds of its steps, but no time between
them. The seconds of a step follow from its tokens, by a line through the recorded steps. Each request gets its recorded
tokens, and its client leaves it after as many. Knows no model, and no drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import RowFailure, StepOutcome, StepPlan, StepResult
from tokenmill.core.scheduling import Feature
from tokenmill.core.transfers import TransferEvent
from tokenmill.engine.loop.engine import Engine, ModelLimits
from tokenmill.engine.loop.step_log import Aborted, Added, LogHeader, RecordedInput, StepRecord, read_log
from tokenmill.engine.scheduler.config import SchedulerConfig, policies_of
from tokenmill.engine.scheduler.scheduler import find_scheduler
from tokenmill.lab.simulate.replay import apply_input

# Request and place of a token -> the token.
Tokens = Mapping[tuple[str, int], int]

# What a policy is called, and its field of the scheduler's config.
POLICIES = {
    "policy": "policy",
    "batch-policy": "batch_policy",
    "admission": "admission",
    "eviction-policy": "eviction_policy",
}


@dataclasses.dataclass(slots=True)
class Schedule:
    """The outcome of one set of policies on the arrivals; times in seconds.

    Attributes:
        num_tokens: tokens that steps ran, including those computed again.
        seconds: from the first arrival to the last step's end.
        first_token, end: of each request that got that far, from its arrival.
    """

    config: SchedulerConfig
    num_steps: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    seconds: float = 0.0
    first_token: list[float] = dataclasses.field(default_factory=list)
    end: list[float] = dataclasses.field(default_factory=list)


class StepCost(msgspec.Struct, frozen=True):
    """Seconds of a step: a fixed part, and a part for each token."""

    per_step: float
    per_token: float

    @classmethod
    def fit_records(cls, records: Sequence[StepRecord]) -> StepCost:
        """Fit a line through the recorded steps."""
        steps = [record for record in records if record.plan is not None]
        seconds = np.array([sum(record.seconds) for record in steps])
        tokens = np.array([sum(record.plan["num_scheduled"]) for record in steps if record.plan is not None])
        if not steps:
            return cls(0.0, 0.0)
        if len(set(tokens.tolist())) == 1:
            return cls(float(seconds.mean()), 0.0)
        per_token, per_step = np.polyfit(tokens, seconds, 1)
        if per_token < 0:
            return cls(float(seconds.mean()), 0.0)
        return cls(max(0.0, float(per_step)), float(per_token))

    def seconds(self, plan: StepPlan) -> float:
        """Return the seconds of one step."""
        return self.per_step + self.per_token * plan.num_tokens


class RecordedTokens:
    """An executor that brings each request its recorded tokens, and ends the request where these end."""

    def __init__(self, tokens: Tokens) -> None:
        self.launched: StepPlan | None = None
        self._tokens = tokens

    def launch(self, plan: StepPlan) -> StepOutcome:
        """Bring the recorded tokens, regardless of the recorded steps."""
        self.launched = plan
        brought, starts, failures = [], [0], {}
        places = (plan.num_computed + plan.num_scheduled).tolist()
        for index, (request_id, place) in enumerate(zip(plan.request_ids, places, strict=True)):
            if plan.num_samples[index]:
                token = self._tokens.get((request_id, place))
                if token is None:
                    failures[index] = RowFailure("the log has no further token of it")
                else:
                    brought.append(token)
            starts.append(len(brought))
        result = StepResult(plan.step, np.array(brought, np.int32), np.array(starts, np.int32), failures=failures)
        return StepOutcome(lambda: result)

    def recover(self) -> None:
        """Do nothing: no step was lost."""

    def close(self) -> None:
        """Do nothing: no step is running."""


def compare(path: Path, others: Sequence[Mapping[str, str]]) -> list[Schedule]:
    """Return the schedule of a log's own policies, and those of other policies, all on the same clock.

    KV that sources brought the recorded engine is computed here: their events answer only that engine's orders.

    Args:
        others: for each, fields of `SchedulerConfig` that differ.

    Raises:
        TokenMillError: the file is no step log, there is no such policy, or the log's scheduler has none.
    """
    header, stored = read_log(path)
    records = list(stored)
    if others and Feature.BATCHES not in find_scheduler(header.scheduler.scheduler_cls).serves:
        raise InvalidConfig(f"the log's scheduler {header.scheduler.scheduler_cls} does not serve {Feature.BATCHES}")
    configs = [msgspec.structs.replace(header.scheduler, **fields) for fields in ({}, *others)]
    for config in configs:
        policies_of(config)
    return [_simulate(header, config, records) for config in configs]


def _simulate(header: LogHeader, config: SchedulerConfig, records: Sequence[StepRecord]) -> Schedule:
    """Run a scheduler on the arrivals of a log."""
    tokens = dict(tokens_of(records))
    arrivals, leaves = arrivals_of(records)
    cost, executor = StepCost.fit_records(records), RecordedTokens(tokens)
    limits = ModelLimits(header.max_model_len, header.vocab_size, frozenset(header.eos_token_ids))
    header.scheduler, header.transfers = config, None
    engine = Engine(header.make_scheduler(), executor, limits, header.depth)
    schedule, arrived, counts = Schedule(config), dict[str, float](), dict[str, int]()
    clock, place = 0.0, 0
    while True:
        while place < len(arrivals) and arrivals[place][0] <= clock:
            at, arrival = arrivals[place]
            place += 1
            if isinstance(arrival, Added):
                arrived[arrival.message.id] = at
            with suppress(InvalidRequest):  # a session that has ended here already
                apply_input(engine, arrival)
        executor.launched = None
        outputs = engine.step()
        if executor.launched is not None:
            clock += cost.seconds(executor.launched)
            schedule.num_steps += 1
            schedule.num_tokens += executor.launched.num_tokens
        elif engine.is_idle:
            if place == len(arrivals):
                break
            clock = max(clock, arrivals[place][0])
        _observe(schedule, outputs, arrived, counts, clock)
        engine.abort([one.id for one in outputs if one.finish_reason is None and counts[one.id] == leaves.get(one.id)])
    schedule.num_preemptions, schedule.seconds = engine.scheduler.counts()["num_preemptions"], clock
    return schedule


def _observe(
    schedule: Schedule,
    outputs: Sequence[TokenOutput],
    arrived: Mapping[str, float],
    counts: dict[str, int],
    clock: float,
) -> None:
    for output in outputs:
        seconds = clock - arrived[output.id]
        if output.token_ids and output.id not in counts:
            schedule.first_token.append(seconds)
        counts[output.id] = counts.get(output.id, 0) + len(output.token_ids)
        if output.finish_reason is not None:
            schedule.end.append(seconds)


def tokens_of(records: Sequence[StepRecord]) -> Iterator[tuple[tuple[str, int], int]]:
    """Yield every token that a step brought, by request and place; of a token sampled again, the last one counts."""
    plans = {record.plan["step"]: record.plan for record in records if record.plan is not None}
    for record in records:
        plan = plans.get(record.committed)
        if plan is None:
            continue
        columns = zip(
            plan["request_ids"], plan["num_computed"], plan["num_scheduled"], plan["num_samples"], strict=True
        )
        for index, (request_id, computed, scheduled, samples) in enumerate(columns):
            first = computed + scheduled - max(0, samples - 1)
            brought = record.token_ids[record.token_starts[index] : record.token_starts[index + 1]]
            for number, token in enumerate(brought):
                yield (request_id, first + number), token


def arrivals_of(records: Sequence[StepRecord]) -> tuple[list[tuple[float, RecordedInput]], dict[str, int]]:
    """Return the inputs with their times, and after how many tokens (if any) clients left their requests."""
    found: list[tuple[float, RecordedInput]] = []
    leaves: dict[str, int] = {}
    counts: dict[str, int] = {}
    plans = {record.plan["step"]: record.plan for record in records if record.plan is not None}
    clock = 0.0
    for record in records:
        for arrival in record.inputs:
            if isinstance(arrival, Aborted):
                leaves |= {one: counts[one] for one in arrival.ids if one in counts}
                found.append((clock, Aborted([one for one in arrival.ids if one not in counts])))
            elif not isinstance(arrival, TransferEvent):
                found.append((clock, arrival))
        clock += record.all_seconds
        plan = plans.get(record.committed)
        for index, request_id in enumerate(plan["request_ids"] if plan is not None else ()):
            brought = record.token_starts[index + 1] - record.token_starts[index]
            if brought:
                counts[request_id] = counts.get(request_id, 0) + brought
    return found, leaves


def table(schedules: Sequence[Schedule]) -> str:
    """Return schedules side by side; the first is that of the log's own policies."""
    rows: list[tuple[str, list[str]]] = [("", ["recorded", *("instead" for _ in schedules[1:])])]
    rows += [(label, [getattr(one.config, field) for one in schedules]) for label, field in POLICIES.items()]
    rows.append(("steps", [f"{one.num_steps:,}" for one in schedules]))
    rows.append(("tokens run", [f"{one.num_tokens:,}" for one in schedules]))
    rows.append(("preemptions", [f"{one.num_preemptions:,}" for one in schedules]))
    rows.append(("seconds in all", [f"{one.seconds:,.2f}" for one in schedules]))
    for name, samples in (
        ("s to first token", [one.first_token for one in schedules]),
        ("s to the end", [one.end for one in schedules]),
    ):
        rows.append((f"{name}, mean", [f"{sum(some) / len(some):,.3f}" if some else "-" for some in samples]))
        for percent in (50, 90, 99):
            row = [f"{np.percentile(some, percent):,.3f}" if some else "-" for some in samples]
            rows.append((f"{name}, p{percent}", row))
    widths = [max(len(cells[column]) for _, cells in rows) for column in range(len(schedules))]
    return "\n".join(
        f"{label:<22}" + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for label, cells in rows
    )
