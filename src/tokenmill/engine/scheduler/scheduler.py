"""The scheduler: `schedule()` makes a plan, `commit()` takes in its outcome.

Several steps may be launched before the first is committed (overlap). Knows no torch, no sockets and no clock: the
same calls give the same plans, so a schedule can be recorded and replayed.
"""

from __future__ import annotations

from tokenmill.config.engine_settings import SCHEDULER_PLUGINS
from tokenmill.core.plan import StepPlan
from tokenmill.core.plugins import find_class
from tokenmill.core.scheduling import Feature, SchedulerInterface
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.scheduler.base import SchedulerBase
from tokenmill.engine.scheduler.schedule_pass import SchedulePass

EngineScheduler = SchedulerInterface[KVManager]


class Scheduler(SchedulerBase):
    """Fills steps as its policies say; serves every feature."""

    serves = frozenset(Feature)

    def schedule(self) -> StepPlan | None:
        """Plan the next step. Return None if nothing can run before a commit or an arrival."""
        step = SchedulePass(self.begin_step(), self._policies, self.state)
        step.make_room()
        self._policies.batch.fill(step)
        step.add_drafts()
        step.explain_waiting()
        return self.launch(step.builder)


def find_scheduler(name: str) -> type[EngineScheduler]:
    """Return the class of schedulers that `--scheduler-cls` names; "": ours.

    Raises:
        InvalidConfig: see `find_class`.
    """
    return find_class("--scheduler-cls", SCHEDULER_PLUGINS, name, SchedulerInterface) if name else Scheduler
