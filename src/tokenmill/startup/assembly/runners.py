"""Make the runner of an engine for its platform, alone or as one of several ranks; capture its graphs, and measure the
memory that its largest step takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from tokenmill.config.configs import EngineConfig
from tokenmill.engine.parallel.devices.collective import DeviceModel
from tokenmill.engine.parallel.devices.runner import FollowingSampler, LeadingRunner, WatchedStream
from tokenmill.engine.parallel.model import RankedModel
from tokenmill.engine.runner.device_runner import DeviceRunner
from tokenmill.engine.runner.model import Model
from tokenmill.engine.runner.model_runner import ModelRunner, PipelinedRunner
from tokenmill.engine.runner.row_state import RowState
from tokenmill.engine.runner.staging import Staging
from tokenmill.engine.runner.step_sampler import DeviceSampler, HostSampler
from tokenmill.engine.runner.transport import HostTransport
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.attention.row_extension import RowExtension
from tokenmill.model.models.native_decoder import in_one_call
from tokenmill.model.sampling.grammar_rows import GrammarRows
from tokenmill.platform.protocol import Platform, Stream
from tokenmill.startup.assembly.drafting import speculation_of
from tokenmill.startup.assembly.loading import LoadedModel, StartupTimer
from tokenmill.startup.assembly.memory import StepMemory
from tokenmill.startup.sizing.kv_size import MIB, KVSize

if TYPE_CHECKING:
    from tokenmill.engine.runner.captured_decodes import CapturedDecodes

logger = logging.getLogger(__name__)

# Decodes beside prompts run in a graph of their own where the weights, which the step then reads twice, are no larger:
# what eager decodes cost, a launch or two in each layer, is half a millisecond (estimated, not measured).
TWICE_READ_BYTES = 2 << 30


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
    rows = RowState(memory.tables, memory.sampling, masks, extensions, native)
    attention = memory.attention
    if platform.is_accelerator:
        return _device_runner(config, platform, model, attention, rows)
    own = in_one_call(model.decoder, attention)
    in_calls = own if model.group is None else model.group.model(own)
    sampler = HostSampler(in_calls, memory.tables, native, rows.heads)
    if config.pipeline_parallel_size > 1:
        assert isinstance(in_calls, RankedModel), "several stages are a group"
        return PipelinedRunner(in_calls, attention, rows, sampler, HostTransport())
    return ModelRunner(in_calls, attention, rows, sampler, HostTransport())


def _device_runner(
    config: EngineConfig, platform: Platform, loaded: LoadedModel, attention: AttentionBackend, rows: RowState
) -> ModelRunner:
    from tokenmill.model.sampling import triton_draw

    stream, takes_parts = platform.stream(), loaded.weight_bytes <= TWICE_READ_BYTES
    group = loaded.group
    if group is None or group.devices is None:
        sampler = DeviceSampler(loaded.decoder, rows.tables, triton_draw.draw)
        graphs = _graphs(config, platform, loaded, stream, attention, loaded.decoder, sampler, rows)
        transport = Staging(platform, stream)
        return DeviceRunner(loaded.decoder, attention, rows, sampler, transport, graphs, takes_parts)
    devices = group.devices
    model, communicator = DeviceModel(loaded.decoder, devices), devices.communicator
    # Weights of ranks may differ by a row of the vocabulary, but all have to run the same parts: rank 0 decides.
    decision = torch.tensor([takes_parts], dtype=torch.int64, device=platform.device)
    takes_parts = bool(communicator.share(decision).item())
    transport = Staging(platform, WatchedStream(stream, group.memory, communicator))
    make: Callable[..., ModelRunner] = DeviceRunner
    if group.shard.rank == 0:
        make = partial(LeadingRunner, group.memory)
        sampler = DeviceSampler(model, rows.tables, triton_draw.draw, communicator.share)
    else:
        sampler = FollowingSampler(model, rows.tables, communicator.share, rows.grammars)
    graphs = _graphs(config, platform, loaded, stream, attention, model, sampler, rows)
    return make(model, attention, rows, sampler, transport, graphs, takes_parts)


def _graphs(
    config: EngineConfig,
    platform: Platform,
    loaded: LoadedModel,
    stream: Stream,
    attention: AttentionBackend,
    model: Model,
    sampler: DeviceSampler,
    rows: RowState,
) -> CapturedDecodes | None:
    """Return the graphs of decode steps, not captured yet; None where decodes cannot be captured."""
    from tokenmill.engine.runner import captured_decodes
    from tokenmill.model.attention.groups import GroupedPagedAttention
    from tokenmill.model.attention.paged import PagedAttention  # these need Triton

    assert isinstance(attention, PagedAttention | GroupedPagedAttention), "a GPU has its attention over pages"
    # One expert, or token, after the other: how many there are, the host has to know.
    architecture = loaded.architecture
    loops = bool(architecture.recurrences) or any(isinstance(layer.mlp, MoeSpec) for layer in architecture.layers)
    if config.enforce_eager or (loops and loaded.kernels.name == "torch"):
        return None
    speculation = speculation_of(config, platform)
    num_drafts = 0 if speculation is None else speculation.most_tokens
    added = rows.extensions
    return captured_decodes.CapturedDecodes(platform, stream, model, attention, sampler, num_drafts, added)


def capture(platform: Platform, runner: ModelRunner, timer: StartupTimer) -> str:
    """Capture graphs, if the runner has any; returns a clause on their number and memory."""
    if runner.graphs is None:
        return ""
    with timer.phase("capturing graphs") as progress:
        before = platform.available_bytes()
        count = runner.graphs.capture(progress)
        taken = max(0, before - platform.available_bytes()) / MIB
        logger.info("captured %d CUDA graphs, which took %.0f MiB", count, taken)
        return f", {count} graphs, {taken:,.0f} MiB"


def least_size(config: EngineConfig, max_model_len: int) -> KVSize:
    """Return the size of a KV cache that just holds the largest step."""
    return KVSize(-(-config.step_budget // config.page_size) + 2 * config.max_num_seqs, max_model_len)


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
        drive(runner)
        return platform.untouched_bytes() + memory.attention.kv.num_bytes
    finally:
        runner.close()
