"""Make the runner of an engine for its platform, alone or as one of several ranks; capture its graphs, and measure the
memory that its largest step takes. Knows no torch: `device_runners` has the runners of GPUs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from tokenmill.config.configs import EngineConfig
from tokenmill.engine.kv.window_pages import WindowSettings
from tokenmill.engine.parallel.model import RankedModel
from tokenmill.engine.runner.model_runner import ModelRunner, PipelinedRunner
from tokenmill.engine.runner.row_state import RowState
from tokenmill.engine.runner.step_sampler import HostSampler
from tokenmill.engine.runner.transport import HostTransport
from tokenmill.model.attention.context_rows import ContextRows
from tokenmill.model.attention.row_extension import RowExtension
from tokenmill.model.models.host_model import on_host
from tokenmill.model.sampling.grammar_rows import GrammarRows
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.loading import LoadedModel, StartupTimer
from tokenmill.startup.assembly.memory import StepMemory
from tokenmill.startup.sizing.kv_size import MIB, KVSize

logger = logging.getLogger(__name__)


def make_runner(
    config: EngineConfig,
    platform: Platform,
    model: LoadedModel,
    memory: StepMemory,
    masks: GrammarRows,
    extensions: Sequence[RowExtension] = (),
) -> ModelRunner:
    """Make the runner of steps for the platform.

    Args:
        extensions: see `RowState`.
    """
    native = getattr(model.kernels, "native", None)
    if (devices := model.attention.config.devices) is not None:
        num_rows, max_pages = memory.tables.pages.shape
        held = ContextRows(devices.rank, devices.size, config.page_size, num_rows, max_pages)
        extensions = [*extensions, held]
    rows = RowState(memory.tables, memory.sampling, masks, extensions, native)
    attention = memory.attention
    if platform.is_accelerator:
        from tokenmill.startup.assembly.device_runners import make_device_runner

        return make_device_runner(config, platform, model, attention, rows)
    own = on_host(model.decoder, attention)
    in_calls = own if model.group is None else model.group.model(own)
    sampler = HostSampler(in_calls, memory.tables, native, rows.heads)
    if config.pipeline_parallel_size > 1:
        assert isinstance(in_calls, RankedModel), "several stages are a group"
        return PipelinedRunner(in_calls, attention, rows, sampler, HostTransport())
    return ModelRunner(in_calls, attention, rows, sampler, HostTransport())


def capture(platform: Platform, runner: ModelRunner, timer: StartupTimer) -> str:
    """Capture graphs, if the runner has any; returns a clause on their number and memory."""
    if runner.graphs is None:
        return ""
    with timer.phase("capturing graphs") as progress:
        before = platform.available_bytes()
        count = runner.graphs.capture(progress)
        count += 0 if runner.draft_model is None else runner.draft_model.capture(progress)
        taken = max(0, before - platform.available_bytes()) / MIB
        logger.info("captured %d CUDA graphs, which took %.0f MiB", count, taken)
        return f", {count} graphs, {taken:,.0f} MiB"


def least_size(config: EngineConfig, max_model_len: int, window: int = 0) -> KVSize:
    """Return the size of a KV cache that just holds the largest step. `window`: of the window group; 0: absent."""
    num_pages = -(-config.step_budget // config.page_size) + 2 * config.max_num_seqs
    windows = WindowSettings(window, num_pages) if window else None
    return KVSize(num_pages, max_model_len, window=windows)


def room_for_kv(
    platform: Platform, make: Callable[[], tuple[ModelRunner, StepMemory]], drive: Callable[[ModelRunner], None]
) -> int:
    """Measure the bytes that the largest step and graph leave for KV.

    Args:
        make: makes a runner with a KV cache that just holds them.
        drive: runs the largest steps.

    Raises:
        OutOfMemory: they do not fit.
    """
    platform.available_bytes()  # from here on it is seen what is taken
    runner, memory = make()
    try:
        if runner.graphs is not None:
            runner.graphs.capture(count=1)
            if runner.draft_model is not None:
                runner.draft_model.capture(lambda done, total: None, 1)
        drive(runner)
        return platform.untouched_bytes() + memory.kv_bytes
    finally:
        runner.close()
