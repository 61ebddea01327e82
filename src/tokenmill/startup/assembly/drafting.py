"""Set up speculation for an engine: its draft model, if one is named, and the step costs that drafts are weighed by."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.config.speculation import SpeculationSettings, SpeculativeConfig, parse_config, settled
from tokenmill.engine.loop.engine import Engine, ModelLimits
from tokenmill.engine.loop.step_log import LogHeader
from tokenmill.engine.runner.executor import Executor
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.step_costs import measure_step_costs

if TYPE_CHECKING:
    from tokenmill.startup.assembly.draft_loading import LoadedDraft


def find_draft(
    config: EngineConfig,
    platform: Platform,
    folder: Path,
    num_threads: int,
    phase: Callable[[str], AbstractContextManager[Callable[[int, int], None]]],
) -> LoadedDraft | None:
    """Load the draft model that a config names for the model in a folder; None: it names none.

    Args:
        phase: opens a phase of the start-up; see `StartupTimer`.

    Raises:
        InvalidConfig, InvalidCheckpoint, OutOfMemory: see `load_draft`.
    """
    speculative = speculation_of(config, platform)
    if speculative is None or speculative.model is None:
        return None
    from tokenmill.startup.assembly.draft_loading import Target, load_draft

    target = Target(read_architecture(folder), Path(config.tokenizer or folder), num_threads)
    with phase("loading the draft model") as progress:
        return load_draft(speculative, config, platform, target, progress)


def speculation_of(config: EngineConfig, platform: Platform) -> SpeculativeConfig | None:
    """Return the speculation that a config asks for on this platform; None: no speculation."""
    return settled(parse_config(config.speculative_config), platform.is_accelerator)


def with_speculation(
    config: EngineConfig, platform: Platform, header: LogHeader, executor: Executor, limits: ModelLimits
) -> LogHeader:
    """Return the header with everything that decides drafts added, if speculation is on."""
    speculation = speculation_of(config, platform)
    if speculation is None:
        return header
    costs = measure_step_costs(lambda drafter: Engine(header.make_scheduler(drafter=drafter), executor, limits))
    if not costs:
        return header
    return msgspec.structs.replace(header, speculation=SpeculationSettings(speculation, costs))


def describe_speculation(settings: SpeculationSettings | None, draft: LoadedDraft | None = None) -> str:
    """Describe how drafts are made and what running them costs; "": no speculation."""
    if settings is None:
        return ""
    config, (_, one), (size, seconds) = settings.config, settings.step_costs[0], settings.step_costs[-1]
    cost = f"a step of {size} tokens takes {seconds / one:.1f} times as long as one of 1"
    source = "" if draft is None else f" of {draft.describe()}"
    return f"{config.method}, drafts of up to {config.most_tokens} tokens{source}; {cost}"
