"""Find the speculation that a config asks for, and the draft model that it may name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.config.configs import EngineConfig
from tokenmill.config.speculation import SpeculativeConfig, parse_config, settled
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.platform.protocol import Platform

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
