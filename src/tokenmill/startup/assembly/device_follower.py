"""Run a rank other than the engine's first on its own device: it takes the plans of rank 0 in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tokenmill.config.configs import EngineConfig
from tokenmill.core.plan import StepResult
from tokenmill.engine.parallel.devices.runner import FollowedGrammars
from tokenmill.engine.parallel.messages import Command, End, EndPhase, RunStep, TakeOutputs
from tokenmill.engine.parallel.shared_memory import SharedMemory
from tokenmill.engine.runner.model_runner import ModelRunner
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.capabilities import CHECKS
from tokenmill.startup.assembly.follower import IDLE_SECONDS
from tokenmill.startup.assembly.loading import Progress, StartupTimer, load, size_kv
from tokenmill.startup.assembly.memory import StepMemory, allocate
from tokenmill.startup.assembly.runners import capture, least_size, make_runner, room_for_kv
from tokenmill.startup.ranks.group import Group
from tokenmill.startup.sizing.kv_size import KVSize, wanted_context


class DeviceFollower:
    """A rank that runs the plans of rank 0.

    Args:
        memory: where the plans come from.
        most: steps that are issued before the first of them must have ended; None: each ends when rank 0 says so, in
            the first of several stages.
    """

    def __init__(self, runner: ModelRunner, memory: SharedMemory, most: int | None) -> None:
        self._runner = runner
        self._memory = memory
        self._most = most
        self._num_steps = 0
        self._running: deque[tuple[int, Callable[[], StepResult]]] = deque()

    def run(self, on_iteration: Callable[[bool], None] = lambda has_work: None) -> None:
        """Follow until rank 0 ends.

        Args:
            on_iteration: see `Follower.run`.

        Raises:
            EngineFailed: another rank is gone, has given up, or has not come in time.
        """
        with self._memory.together():
            while not isinstance(command := self._memory.receive(IDLE_SECONDS), End | EndPhase):
                on_iteration(command is not None)
                self._obey(command)
            self._finish(0)

    def _obey(self, command: Command | None) -> None:
        match command:
            case None:
                self._finish(0)
            case RunStep():
                self._num_steps += 1
                self._running.append((self._num_steps, self._runner.start(command.step_plan(), None)))
                self._finish(self._most or 0)
            case TakeOutputs(number):
                self._take_outputs(number)
            case _:
                raise AssertionError("ranks on devices run steps")

    def _take_outputs(self, number: int) -> None:
        """Finish the step with this number where rank 0 decides when; those before it nobody has asked for."""
        while self._most is None and self._running:
            own, finish = self._running.popleft()
            if own == number:
                finish()
                return

    def close(self) -> None:
        """Release the resources that steps ran with."""
        self._runner.close()

    def _finish(self, most: int) -> None:
        """Wait until at most `most` steps are in flight; their results are rank 0's business."""
        while self._most is not None and len(self._running) > most:
            self._running.popleft()[1]()


def build_device_follower(
    config: EngineConfig, group: Group, platform: Platform, report: Progress = lambda *_: None
) -> DeviceFollower:
    """Load this rank's part of the model and follow rank 0's start; every step of that start is run by all ranks.

    Args:
        config: resolved, of this rank. platform: where it runs.

    Raises:
        InvalidCheckpoint, InvalidConfig, OutOfMemory: as when an engine is built.
        EngineFailed: another rank has failed.
    """
    timer, grammars = StartupTimer(report), FollowedGrammars()
    model = load(config, platform, timer, CHECKS, group)
    most = None if group.shard.is_first_stage and group.shard.num_stages > 1 else config.num_steps_ahead

    def make(size: KVSize) -> tuple[ModelRunner, StepMemory]:
        memory = allocate(config, platform, model.decoder, model.attention, size)
        return make_runner(config, platform, model, memory, grammars), memory

    available = None
    if config.num_pages is None and config.kv_cache_memory_bytes is None:
        longest = wanted_context(config, model.architecture.max_position)

        available = room_for_kv(
            platform,
            lambda: make(least_size(config, longest)),
            lambda runner: DeviceFollower(runner, group.memory, most).run(),
        )
    runner, _ = make(size_kv(config, platform, model, available))
    capture(platform, runner, timer)
    return DeviceFollower(runner, group.memory, most)
