"""Check a class of schedulers on random traces: what every scheduler must hold, whatever it decides.

On each trace: plans that can be run, within all limits; rows and pages that no launched step loses; positions without a
gap; a token sampled where the last known one runs, and only there; every request answered once, with the tokens that
its pages say; nothing starved, lost or left in use; aborts at any time, failed steps, resets; the same plans again.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenmill.engine.scheduler.scheduler import EngineScheduler, find_scheduler
from tokenmill.lab.conformance.plan_checks import SchedulerFault
from tokenmill.lab.conformance.trace import Trace

EVENTS = 80


def check_scheduler(
    scheduler: type[EngineScheduler] | str, num_traces: int = 50, seed: int | None = None, **settings: Any
) -> int:
    """Run traces on a class of schedulers, each twice; return how many steps were checked.

    Args:
        scheduler: the class, or its name as `--scheduler-cls` takes it.
        seed: of the first trace, the next one has the next number; None: drawn. A fault names its own.
        settings: fields of `SchedulerConfig` that are not drawn, such as `admission="reserve"`.

    Raises:
        SchedulerFault: the scheduler is at fault; says how, and with which seed it is seen again.
    """
    kind = find_scheduler(scheduler) if isinstance(scheduler, str) else scheduler
    first = random.randrange(2**32) if seed is None else seed
    with _quiet("tokenmill.engine.loop.engine"):  # steps fail on purpose
        return sum(_check_trace(kind, number, settings) for number in range(first, first + num_traces))


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    log = logging.getLogger(name)
    was_quiet, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_quiet


def _check_trace(kind: type[EngineScheduler], seed: int, settings: dict[str, Any]) -> int:
    plans = _run_trace(kind, seed, settings)
    again = _run_trace(kind, seed, settings)
    for number, (plan, other) in enumerate(zip(plans, again, strict=False), 1):
        if plan != other:
            raise SchedulerFault(f"{kind.__name__}, seed {seed}: the same calls give another plan of step {number}")
    return len(plans)


def _run_trace(kind: type[EngineScheduler], seed: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    trace = Trace(kind, random.Random(seed), **settings)
    try:
        for _ in range(EVENTS):
            trace.act()
        trace.flood()
        trace.drain()
    except Exception as error:
        fault = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        raise SchedulerFault(f"{kind.__name__}, seed {seed}: {fault}") from error
    return trace.plans
