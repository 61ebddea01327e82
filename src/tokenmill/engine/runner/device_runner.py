"""`DeviceRunner`: a runner of steps that torch issues to a device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tokenmill.core.plan import StepOutcome, StepPlan, StepResult
from tokenmill.engine.runner.model_runner import ModelRunner


class DeviceRunner(ModelRunner):
    """Runs steps without the bookkeeping that torch does for gradients."""

    @torch.inference_mode()
    def start(self, plan: StepPlan, previous: StepOutcome | None) -> Callable[[], StepResult]:
        """Start a step; see `ModelRunner.start`."""
        return super().start(plan, previous)
