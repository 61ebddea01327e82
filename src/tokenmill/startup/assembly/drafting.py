"""Find the speculation that a config asks for, and the draft model that it may name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.config.configs import EngineConfig
from tokenmill.config.model_files import read_json
from tokenmill.config.speculation import SpeculativeConfig, parse_config, settled
from tokenmill.core.errors import InvalidConfig
from tokenmill.model.models.draft_head_config import is_draft_head
from tokenmill.model.weights.checkpoint import CONFIG_NAME, read_architecture
from tokenmill.model.weights.hub import fetch
from tokenmill.platform.protocol import Platform

if TYPE_CHECKING:
    from tokenmill.startup.assembly.draft_loading import LoadedDraft


NO_HEADS = (
    "--speculative-config: draft heads and MTP layers run on CPUs so far; draft models, ngram and suffix anywhere"
)


def find_draft(
    config: EngineConfig,
    platform: Platform,
    folder: Path,
    num_threads: int,
    phase: Callable[[str], AbstractContextManager[Callable[[int, int], None]]],
) -> LoadedDraft | None:
    """Load the draft model or head that a config names for the model in a folder; None: it names none.

    Of several ranks the first has it whole, and the others run its drafts as any others, from the plans that they get.

    Args:
        phase: opens a phase of the start-up; see `StartupTimer`.

    Raises:
        InvalidConfig, InvalidCheckpoint, OutOfMemory: see `load_draft`.
    """
    speculative = speculation_of(config, platform)
    if speculative is None or not speculative.loads_weights:
        return None
    if platform.is_accelerator:
        _check_accelerator(speculative, config)
    if config.rank:
        return None
    from tokenmill.startup.assembly.draft_loading import Target, load_draft
    from tokenmill.startup.assembly.head_loading import load_head, load_mtp

    target = Target(read_architecture(folder), Path(config.tokenizer or folder), num_threads)
    with phase("loading the draft model") as progress:
        if speculative.model is None:
            return load_mtp(speculative, config, platform, target, folder, progress)
        own = fetch(speculative.model, None, config.download_dir, progress)
        is_head = speculative.method == "eagle3" or is_draft_head(read_json(own, CONFIG_NAME))
        if is_head and platform.is_accelerator:
            raise InvalidConfig(NO_HEADS)
        return (load_head if is_head else load_draft)(speculative, config, platform, target, own, progress)


def speculation_of(config: EngineConfig, platform: Platform) -> SpeculativeConfig | None:
    """Return the speculation that a config asks for on this platform; None: no speculation."""
    return settled(parse_config(config.speculative_config), platform.is_accelerator)


def _check_accelerator(speculative: SpeculativeConfig, config: EngineConfig) -> None:
    """Refuse what cannot draft on a GPU, before anything is read.

    Raises:
        InvalidConfig: which setting, and what to change.
    """
    if speculative.method in ("eagle3", "mtp"):
        raise InvalidConfig(NO_HEADS)
    if config.pipeline_parallel_size > 1:
        raise InvalidConfig(
            "--speculative-config: on GPUs a draft model drafts behind one step at a time, and stages run several: "
            "take --tensor-parallel-size instead of --pipeline-parallel-size, or suffix"
        )
    if speculative.quantization in ("int8", "int4"):
        raise InvalidConfig(
            f"--speculative-config: quantization {speculative.quantization} is for CPUs: leave it out, or say none"
        )
