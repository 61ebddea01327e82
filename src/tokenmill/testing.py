"""Checks for authors of plug-ins, for use in their own tests. The names stay; modules behind them may move.

from tokenmill.testing import check_scheduler

def test_it_is_a_scheduler():
    check_scheduler("my_module:MyScheduler")
"""

from __future__ import annotations

from tokenmill.lab.conformance.check import check_scheduler
from tokenmill.lab.conformance.plan_checks import SchedulerFault

__all__ = ["SchedulerFault", "check_scheduler"]
