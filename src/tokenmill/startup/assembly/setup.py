"""From a config to a running engine: find the model, load it, size the KV cache and put the parts together.

Names no capability: what each brings, it brings itself (`capability.py`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.config.model_files import eos_token_ids
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import OutOfMemory
from tokenmill.core.extension import EngineExtension
from tokenmill.engine.loop.engine import Engine, ModelLimits
from tokenmill.engine.loop.gates import Gates
from tokenmill.engine.loop.observer import Observer
from tokenmill.engine.loop.step_log import LogHeader, StepLog
from tokenmill.engine.parallel.messages import EndPhase
from tokenmill.engine.runner.executor import Executor, InlineExecutor, ThreadExecutor
from tokenmill.engine.runner.model_runner import ModelRunner
from tokenmill.engine.scheduler.config import find_policies
from tokenmill.model.models.native_decoder import native_pass_obstacle
from tokenmill.model.weights.checkpoint import stored_format
from tokenmill.model.weights.fingerprint import fingerprint
from tokenmill.platform.memory import return_freed_memory
from tokenmill.platform.protocol import Platform
from tokenmill.platform.select import select_platform
from tokenmill.startup.assembly.capabilities import CAPABILITIES
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.loading import LoadedModel, Progress, StartupTimer, load, size_kv
from tokenmill.startup.assembly.memory import StepMemory, allocate, take_memory
from tokenmill.startup.assembly.runners import capture, least_size, make_runner, room_for_kv
from tokenmill.startup.assembly.scheduler_class import check_scheduler_flags, check_scheduler_model
from tokenmill.startup.assembly.warm_up import warm_up
from tokenmill.startup.machine.torch_needs import check_torch
from tokenmill.startup.ranks.group import config_of_rank, start_group
from tokenmill.startup.sizing.kv_size import KVSize, wanted_context

logger = logging.getLogger(__name__)


class BuiltEngine(msgspec.Struct, frozen=True):
    """An engine, the description of it that the other processes get, and work for idle iterations.

    Attributes:
        model: the model that it runs; another engine may be built on it once this one is closed.
    """

    engine: Engine
    ready: EngineReady
    idle_work: Iterator[None]
    model: LoadedModel


def build_engine(
    config: EngineConfig,
    report: Progress = lambda *_: None,
    platform: Platform | None = None,
    model: LoadedModel | None = None,
    capabilities: Sequence[type[Capability]] = CAPABILITIES,
) -> BuiltEngine:
    """Load a model and make an engine for it.

    Args:
        config: resolved.
        report: called with (phase, done, total) during the start.
        platform: where it runs, instead of the config's device.
        model: loaded before from the same config; None: load it.
        capabilities: those that it may have; the config and the model say which of them it has.

    Raises:
        InvalidCheckpoint, InvalidConfig, OutOfMemory: what is wrong and what to change, in one sentence.
    """
    timer = StartupTimer(report)
    platform = platform or select_platform(config.device)
    config = dataclasses.replace(config, device=platform.device).resolve()
    policies = config.scheduling_policy, config.batch_policy, config.admission, config.eviction_policy
    find_policies(*policies)  # before the weights are read
    check_scheduler_flags(config)
    check_torch(config, None, platform)
    group = start_group(config)
    config = config_of_rank(config)
    try:
        if model is None:
            checks = [check_scheduler_model, *(each.check for each in capabilities)]
            model = load(config, platform, timer, checks, group)
        assembly = Assembly(config, platform, timer, model, _limits(config, model))
        assembly.install(capabilities)
        return _build(assembly)
    except BaseException as error:
        if group is not None:
            group.abandon(error)
        if isinstance(error, OutOfMemory) or not platform.is_out_of_memory(error):
            raise
        free = platform.available_bytes() >> 20
        raise OutOfMemory(
            f"memory ran out while {timer.current}, {free:,} MiB are free now: a smaller KV cache "
            "(--kv-cache-memory-bytes), fewer rows (--max-num-seqs) or smaller weights (--quantization) take less"
        ) from error


def _build(assembly: Assembly) -> BuiltEngine:
    """Put together an engine whose weights are in memory, as its capabilities are."""
    platform, timer, model = assembly.platform, assembly.timer, assembly.model
    memory = _allocate(assembly)
    runner = _make_runner(assembly, memory)
    graphs = capture(platform, runner, timer)
    executor = _executor(assembly, runner)
    header = log_header(assembly.config, memory.size, assembly.limits)
    with timer.phase("warming up"):
        warm_up(Engine(header.make_scheduler(), executor, assembly.limits), platform)
        for capability in assembly.capabilities:
            header = capability.settle(header, memory, executor)
        return_freed_memory()  # loading leaves tens of MB behind
    engine = _engine(assembly, header, executor)
    ready = describe(assembly.config, platform, model, memory, graphs, timer.seconds)
    ready.fingerprint = assembly.limits.fingerprint
    for capability in assembly.capabilities:
        capability.describe(ready, memory)
    return BuiltEngine(engine, ready, take_memory(assembly.config, platform, memory), model)


def _limits(config: EngineConfig, model: LoadedModel) -> ModelLimits:
    """Return the limits of a model, with the context that the config wants: the KV cache has no size yet."""
    return ModelLimits(
        wanted_context(config, model.architecture.max_position),
        model.architecture.vocab_size,
        eos_token_ids(model.folder),
        fingerprint(model.folder, *_forms(config, model)),
        model.architecture.has_head,
    )


def _forms(config: EngineConfig, model: LoadedModel) -> tuple[str, ...]:
    """Return everything besides the model's files that makes KV differ."""
    forms = (config.dtype, config.weight_form, config.kv_cache_dtype, str(config.page_size))
    return (*forms, *filter(None, (model.merged, model.architecture.context_form)))


def _allocate(assembly: Assembly) -> StepMemory:
    """Decide the size of the KV cache, after measuring a step where that tells more, and allocate it."""
    config, platform, model = assembly.config, assembly.platform, assembly.model
    available = None
    if platform.is_accelerator and config.num_pages is None and config.kv_cache_memory_bytes is None:
        with assembly.timer.phase("measuring a step"):
            available = _room_for_kv(assembly)
    with assembly.timer.phase("allocating KV"):
        reserved = sum(capability.reserved_bytes for capability in assembly.capabilities)
        size = assembly.sized(size_kv(config, platform, model, available, reserved))
        arrays = None if model.group is None else model.group.arrays
        memory = allocate(config, platform, model.decoder, model.attention, size, model.draft, arrays)
    assembly.limits = msgspec.structs.replace(assembly.limits, max_model_len=size.max_model_len)
    return memory


def _room_for_kv(assembly: Assembly) -> int:
    """Return the bytes left for KV, measured by running the largest steps."""
    config, platform, model, limits = assembly.config, assembly.platform, assembly.model, assembly.limits
    window = model.page_bytes.window if model.window_obstacle is None else 0
    size = assembly.sized(least_size(config, limits.max_model_len, window))

    def make() -> tuple[ModelRunner, StepMemory]:
        memory = allocate(config, platform, model.decoder, model.attention, size, model.draft)
        return _make_runner(assembly, memory), memory

    def drive(runner: ModelRunner) -> None:
        scheduler = log_header(config, size, limits).make_scheduler()
        warm_up(Engine(scheduler, InlineExecutor(runner, platform.synchronize), limits), platform)
        if model.group is not None:
            model.group.memory.post(EndPhase())

    return room_for_kv(platform, make, drive)


def _make_runner(assembly: Assembly, memory: StepMemory) -> ModelRunner:
    extensions, masks = assembly.row_extensions(memory), assembly.new_grammar_rows()
    runner = make_runner(assembly.config, assembly.platform, assembly.model, memory, masks, extensions)
    for capability in assembly.capabilities:
        capability.complete(runner, memory)
    return runner


def _executor(assembly: Assembly, runner: ModelRunner) -> Executor:
    """Return the executor that launches steps: inline, on a thread, or with the other ranks."""
    config, platform, group = assembly.config, assembly.platform, assembly.model.group
    on_thread = config.async_scheduling and not platform.is_accelerator and config.pipeline_parallel_size == 1
    executor: Executor = ThreadExecutor(runner) if on_thread else InlineExecutor(runner, platform.synchronize)
    return executor if group is None else group.executor(executor)


def _engine(assembly: Assembly, header: LogHeader, executor: Executor) -> Engine:
    """Make the loop around scheduler and executor, with the capabilities' parts of it."""
    config = assembly.config
    log = StepLog(Path(config.step_log) if config.step_log else None, header)
    scheduler = header.make_scheduler(resources=assembly.resources())
    extensions: list[EngineExtension] = []
    for capability in assembly.capabilities:
        extensions += capability.engine_extensions(scheduler)
        executor = capability.executor(executor)
    gates = list(assembly.gates())
    if gates:
        extensions.insert(0, Gates(gates))
    return Engine(scheduler, executor, assembly.limits, header.depth, Observer(log), extensions)


def describe(
    config: EngineConfig,
    platform: Platform,
    model: LoadedModel,
    memory: StepMemory,
    graphs: str,
    seconds: dict[str, float],
) -> EngineReady:
    """Describe an engine for the other processes."""
    architecture, size = model.architecture, memory.size
    return EngineReady(
        model=str(model.folder),
        architecture=architecture.name,
        num_parameters=architecture.num_parameters(),
        dtype=config.dtype,
        device=platform.name,
        kernels=model.kernels.name,
        kernels_reason=model.kernels_reason + _pass_reason(model),
        attention_backend=model.attention.name,
        attention_reason=model.attention.reason + graphs,
        max_model_len=size.max_model_len,
        vocab_size=architecture.vocab_size,
        page_size=config.page_size,
        num_pages=size.num_pages,
        # Ranks on CPUs map the memory of all.
        kv_bytes=memory.kv_bytes // (1 if platform.is_accelerator else config.context_parallel_size),
        weight_bytes=model.weight_bytes,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_budget,
        num_threads=model.num_threads,
        threads_reason=_ranks_reason(config) + model.threads_reason,
        seconds=seconds,
        weights_source=model.weights.source,
        stored=stored_format(model.folder, config.dtype, config.quantization),
        truncate_inputs=config.truncate_inputs,
    )


def _ranks_reason(config: EngineConfig) -> str:
    """Return a prefix that says how many ranks share the model; "": only one."""
    size = config.num_ranks
    how = " that share the context" if config.context_parallel_size > 1 else ""
    return "" if size == 1 else f"of each of {size} ranks{how}, as weights and KV: "


def _pass_reason(model: LoadedModel) -> str:
    """Return a clause on how native kernels are called; "": the kernels are not native."""
    if model.kernels.name != "native":
        return ""
    reason = native_pass_obstacle(model.decoder, model.attention.name)
    return ", one call a step" if reason is None else f", one call a kernel: {reason}"


def log_header(config: EngineConfig, size: KVSize, limits: ModelLimits) -> LogHeader:
    """Return the step log's header: all that a replay of the schedule needs.

    Raises:
        InvalidConfig: the scheduler cannot be configured so; see `scheduler_config_of`.
    """
    eos = sorted(limits.eos_token_ids)
    header = LogHeader.from_config(config, size.num_pages, size.max_model_len, limits.vocab_size, eos, size.num_states)
    header.window, header.keeps_kv = size.window, size.keeps_kv
    return header
