"""Speculation: drafts that decodes run ahead, and the costs of steps that they are weighed by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import msgspec

from tokenmill.config.speculation import SpeculationSettings, SpeculativeConfig
from tokenmill.core.engine_messages import EngineReady
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.loop.step_log import LogHeader
from tokenmill.engine.runner.executor import Executor
from tokenmill.engine.runner.model_runner import ModelRunner
from tokenmill.engine.speculation.drafts import StepDrafter
from tokenmill.model.attention.row_extension import RowExtension
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.drafting import speculation_of
from tokenmill.startup.assembly.memory import StepMemory
from tokenmill.startup.assembly.step_costs import measure_step_costs


class Speculation(Capability):
    """The scheduler drafts by the settings in its header; a draft model stands behind the runner."""

    def __init__(self, assembly: Assembly, config: SpeculativeConfig) -> None:
        self._assembly = assembly
        self._config = config
        self._settings: SpeculationSettings | None = None
        # Of the runner that is being made.
        self._drafter: StepDrafter | None = None

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Speculate if the config says how on this platform. A draft model has been loaded with the model."""
        config = speculation_of(assembly.config, assembly.platform)
        if assembly.model.draft is not None:
            assembly.model.draft.attach(assembly.model.decoder)
        return None if config is None else cls(assembly, config)

    def row_extensions(self, memory: StepMemory) -> Sequence[RowExtension]:
        """Let steps keep what a draft head takes, and send what a draft model on a device does."""
        draft = self._assembly.model.draft
        if draft is None:
            return ()
        if memory.draft is not None:
            max_len = memory.size.max_model_len
            self._drafter = draft.bind(memory.draft, memory.tables, max_len, memory.beside)
        return (*draft.extensions, *([self._drafter] if isinstance(self._drafter, RowExtension) else []))

    def complete(self, runner: ModelRunner, memory: StepMemory) -> None:
        """Let the draft model, if there is one, propose what may follow each step."""
        runner.draft_model = self._drafter
        self._drafter = None

    def settle(self, header: LogHeader, memory: StepMemory, executor: Executor) -> LogHeader:
        """Add everything that decides drafts, unless no step can be measured that has any."""
        limits = self._assembly.limits
        costs = measure_step_costs(lambda drafter: Engine(header.make_scheduler(drafter=drafter), executor, limits))
        if not costs:
            return header
        self._settings = SpeculationSettings(self._config, costs)
        return msgspec.structs.replace(header, speculation=self._settings)

    def describe(self, ready: EngineReady, memory: StepMemory) -> None:
        """Tell how drafts are made and what running them costs."""
        draft = self._assembly.model.draft
        if draft is not None:
            ready.weight_bytes += draft.weight_bytes
        if self._settings is not None:
            ready.speculation = _describe(self._settings, "" if draft is None else f" of {draft.describe()}")


def _describe(settings: SpeculationSettings, source: str) -> str:
    config, (_, one), (size, seconds) = settings.config, settings.step_costs[0], settings.step_costs[-1]
    cost = f"a step of {size} tokens takes {seconds / one:.1f} times as long as one of 1"
    return f"{config.method}, drafts of up to {config.most_tokens} tokens{source}; {cost}"
