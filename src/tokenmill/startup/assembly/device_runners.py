"""Make the runner of an engine on a GPU, alone or as one of several ranks. Imported where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tokenmill.config.configs import EngineConfig
from tokenmill.core.hooks import hooks
from tokenmill.engine.parallel.devices.collective import DeviceModel
from tokenmill.engine.parallel.devices.runner import FollowingSampler, LeadingRunner, WatchedStream
from tokenmill.engine.parallel.devices.stage_model import StageModel
from tokenmill.engine.parallel.devices.stages import CapturedLayers, FirstStageRunner, LaterStageRunner
from tokenmill.engine.runner.captured_decodes import CapturedDecodes
from tokenmill.engine.runner.device_runner import DeviceRunner
from tokenmill.engine.runner.device_sampler import DeviceSampler
from tokenmill.engine.runner.model import Model
from tokenmill.engine.runner.model_runner import ModelRunner
from tokenmill.engine.runner.row_state import RowState
from tokenmill.engine.runner.staging import NUM_SLOTS, Staging
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.attention.groups import GroupedPagedAttention
from tokenmill.model.attention.paged import PagedAttention
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.attention.row_extension import RowExtension
from tokenmill.model.sampling import triton_draw
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.drafting import speculation_of
from tokenmill.startup.assembly.loading import LoadedModel

# Decodes beside prompts run in a graph of their own where the weights, which the step then reads twice, are no larger:
# what eager decodes cost, a launch or two in each layer, is half a millisecond (estimated, not measured).
TWICE_READ_BYTES = 2 << 30


def make_device_runner(
    config: EngineConfig, platform: Platform, loaded: LoadedModel, attention: AttentionBackend, rows: RowState
) -> ModelRunner:
    """Make the runner of a GPU, with its graphs not captured yet."""
    assert isinstance(attention, PagedAttention | GroupedPagedAttention), "a GPU has its attention over pages"
    stream, takes_parts = platform.stream(), loaded.weight_bytes <= TWICE_READ_BYTES
    group = loaded.group
    if group is None or group.devices is None:
        adding = hooks(rows.extensions, RowExtension.add_logits)
        sampler = DeviceSampler(loaded.decoder, rows.tables, triton_draw.draw, adding=adding)
        parts = (platform, stream, loaded.decoder, attention, sampler)
        graphs = _graphs(config, platform, loaded, rows, partial(CapturedDecodes, *parts))
        transport = Staging(platform, stream)
        return DeviceRunner(loaded.decoder, attention, rows, sampler, transport, graphs, takes_parts)
    devices, shard, communicator = group.devices, group.devices.shard, group.devices.communicator
    make: Callable[..., ModelRunner] = DeviceRunner if shard.rank else partial(LeadingRunner, group.memory)
    captured: Callable[..., CapturedDecodes] = CapturedDecodes
    model: Model = loaded.decoder if config.context_parallel_size > 1 else DeviceModel(loaded.decoder, devices)
    if devices.ring is not None:
        model, takes_parts = StageModel(loaded.decoder, devices, platform.device), False
        make = partial(FirstStageRunner, group.memory) if shard.is_first_stage else LaterStageRunner
        captured = partial(CapturedLayers, shard.is_first_stage, group.wait_for_all)
    # Weights of ranks may differ by a row of the vocabulary, but all have to run the same parts: rank 0 decides.
    decision = torch.full((1,), int(takes_parts), dtype=torch.int64, device=platform.device)
    takes_parts = bool(communicator.share(decision).item())
    watched = WatchedStream(stream, group.memory, devices)
    transport = Staging(platform, watched, max(NUM_SLOTS, config.num_steps_ahead + 1))
    sampler = FollowingSampler(model, rows.tables, communicator.share, rows.grammars)
    if shard.rank == 0:
        sampler = DeviceSampler(model, rows.tables, triton_draw.draw, communicator.share)
    graphs = _graphs(config, platform, loaded, rows, partial(captured, platform, stream, model, attention, sampler))
    return make(model, attention, rows, sampler, transport, graphs, takes_parts)


def _graphs(
    config: EngineConfig,
    platform: Platform,
    loaded: LoadedModel,
    rows: RowState,
    make: Callable[[int, Sequence[RowExtension]], CapturedDecodes],
) -> CapturedDecodes | None:
    """Return the graphs of decode steps, not captured yet; None where there are none, or they cannot be captured.

    Args:
        make: makes them for a number of drafts of a request, and for the stores of capabilities.
    """
    # One expert, or token, after the other: how many there are, the host has to know.
    architecture = loaded.architecture
    loops = bool(architecture.recurrences) or any(isinstance(layer.mlp, MoeSpec) for layer in architecture.layers)
    # Of contexts over devices as much travels as a step has: a graph would send what its longest may have.
    is_eager = config.enforce_eager or config.context_parallel_size > 1
    if not architecture.has_head or is_eager or (loops and loaded.kernels.name == "torch"):
        return None
    speculation = speculation_of(config, platform)
    # Where states are taken back with drafts, steps that have some are not captured.
    num_drafts = 0 if speculation is None or architecture.recurrences else speculation.most_tokens
    return make(num_drafts, rows.extensions)
