"""From a config to a running engine: find the model, load it, size the KV cache and put the parts together."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from tokenmill.config.configs import EngineConfig
from tokenmill.config.model_files import eos_token_ids
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import OutOfMemory
from tokenmill.core.extension import EngineExtension
from tokenmill.engine.kv.events import KVEventLog
from tokenmill.engine.loop.engine import Engine, ModelLimits
from tokenmill.engine.loop.gates import Gate, Gates
from tokenmill.engine.loop.observer import Observer
from tokenmill.engine.loop.step_log import LogHeader, StepLog
from tokenmill.engine.parallel.messages import EndPhase
from tokenmill.engine.runner.executor import Executor, InlineExecutor, ThreadExecutor
from tokenmill.engine.runner.model_runner import ModelRunner
from tokenmill.engine.scheduler.config import find_policies
from tokenmill.ipc.sandbox import Limits
from tokenmill.model.adapters.cache import AdapterCache
from tokenmill.model.adapters.requests import AdapterRequests
from tokenmill.model.models.native_decoder import native_pass_obstacle
from tokenmill.model.structured.cache import GrammarCache
from tokenmill.model.structured.compiler import GrammarTokenizer
from tokenmill.model.weights.fingerprint import fingerprint
from tokenmill.platform.protocol import Platform
from tokenmill.platform.select import select_platform
from tokenmill.startup.assembly.adapters import adapter_cache, first_adapters
from tokenmill.startup.assembly.drafting import describe_speculation, with_speculation
from tokenmill.startup.assembly.loading import LoadedModel, Progress, StartupTimer, load, size_kv
from tokenmill.startup.assembly.memory import StepMemory, allocate, connect_sources, take_memory
from tokenmill.startup.assembly.runners import capture, make_runner, masks_of, room_for_kv
from tokenmill.startup.assembly.vision import Vision, load_vision
from tokenmill.startup.assembly.warm_up import warm_up
from tokenmill.startup.ranks.group import Group, config_of_rank, start_group
from tokenmill.startup.sizing.kv_size import KVSize, wanted_context
from tokenmill.startup.sizing.state_size import num_states, with_states
from tokenmill.startup.sizing.window_size import describe_windows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, the description of it that the other processes get, and work for idle turns.

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
) -> BuiltEngine:
    """Load a model and make an engine for it.

    Args:
        config: resolved.
        report: called with (phase, done, total) during the start.
        platform: where it runs, instead of the config's device.
        model: loaded before from the same config; None: load it.

    Raises:
        InvalidCheckpoint, InvalidConfig, OutOfMemory: what is wrong and what to change, in one sentence.
    """
    timer = StartupTimer(report)
    platform = platform or select_platform(config.device)
    config = dataclasses.replace(config, device=platform.device).resolve()
    find_policies(config.scheduling_policy, config.batch_policy, config.admission)  # before the weights are read
    group = start_group(config)
    config = config_of_rank(config)
    try:
        return _build(config, platform, timer, model, group)
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


def _build(
    config: EngineConfig, platform: Platform, timer: StartupTimer, model: LoadedModel | None, group: Group | None
) -> BuiltEngine:
    model = model or load(config, platform, timer, group)
    limits = ModelLimits(
        wanted_context(config, model.architecture.max_position),
        model.architecture.vocab_size,
        eos_token_ids(model.folder),
        fingerprint(model.folder, *_forms(config, model)),
    )
    grammars = grammar_cache(config, model.folder, limits)
    in_calls = native_pass_obstacle(model.decoder, model.attention.name) is None
    adapters = adapter_cache(config, platform, model.decoder, model.kernels, in_calls)
    named = first_adapters(config, adapters)
    with timer.phase("loading the vision tower") if model.architecture.takes_images else nullcontext():
        vision = load_vision(config, model)
    config = with_states(config, model.architecture, platform.available_bytes())
    available = None
    if platform.is_accelerator and config.num_pages is None and config.kv_cache_memory_bytes is None:
        with timer.phase("measuring a step"):
            available = _room_for_kv(config, platform, model, limits, grammars, adapters, vision)
    with timer.phase("allocating KV"):
        size = size_kv(config, platform, model, available, 0 if vision is None else vision.memory.reserved)
        size = dataclasses.replace(size, num_states=num_states(config, model.architecture))
        memory = allocate(config, platform, model.decoder, model.attention, size, model.draft)
    limits = dataclasses.replace(limits, max_model_len=size.max_model_len)
    masks = masks_of(config, platform, model, grammars)
    runner = make_runner(config, platform, model, memory, masks, adapters, vision)
    graphs = capture(platform, runner, timer)
    on_thread = config.async_scheduling and not platform.is_accelerator and config.pipeline_parallel_size == 1
    executor: Executor = ThreadExecutor(runner) if on_thread else InlineExecutor(runner, platform.synchronize)
    if model.group is not None:
        executor = model.group.executor(executor)
    header = log_header(config, size, limits)
    with timer.phase("warming up"):
        warm_up(Engine(header.make_scheduler(), executor, limits), platform)
        header = with_speculation(config, platform, header, executor, limits)
    # Kernels of another level round in another way.
    whose = f"{limits.fingerprint}/{model.kernels.name}/{model.kernels_reason}"
    connection = connect_sources(config, platform, memory, model.attention.name, whose)
    header = header if connection is None else connection.with_settings(header)
    events = KVEventLog() if config.kv_events() is not None else None
    log = StepLog(Path(config.step_log) if config.step_log else None, header)
    scheduler = header.make_scheduler(events)
    extensions: list[EngineExtension] = [Gates(_gates(grammars, adapters, vision))]
    if adapters is not None:
        extensions.append(AdapterRequests(adapters))
    if connection is not None:
        executor, transfers = connection.join(scheduler, executor)
        extensions.append(transfers)
    engine = Engine(scheduler, executor, limits, header.depth, Observer(log), extensions)
    ready = describe(config, platform, model, memory, graphs, timer.seconds)
    ready.fingerprint = limits.fingerprint
    ready.adapters, ready.max_loras = named, config.max_loras if config.enable_lora else 0
    if vision is not None:
        ready.takes_images = True
        ready.weight_bytes += vision.memory.weights
    ready.takes_transfer_params = connection is not None and connection.takes_params
    ready.speculation = describe_speculation(header.speculation, model.draft)
    return BuiltEngine(engine, ready, take_memory(config, platform, memory), model)


def _gates(grammars: GrammarCache, adapters: AdapterCache | None, vision: Vision | None) -> list[Gate]:
    """Return the gates at which this engine's requests may have to wait."""
    gates = (grammars, adapters, None if vision is None else vision.pixels)
    return [gate for gate in gates if gate is not None]


def _forms(config: EngineConfig, model: LoadedModel) -> tuple[str, ...]:
    """Return everything besides the model's files that makes KV differ."""
    forms = (config.dtype, config.quantization, config.kv_cache_dtype, str(config.page_size))
    return (*forms, *filter(None, (model.merged, model.architecture.context_form)))


def _room_for_kv(
    config: EngineConfig,
    platform: Platform,
    model: LoadedModel,
    limits: ModelLimits,
    grammars: GrammarCache,
    adapters: AdapterCache | None,
    vision: Vision | None,
) -> int:
    """Return the bytes left for KV, measured by running the largest steps."""

    def drive(runner: ModelRunner, size: KVSize) -> None:
        scheduler = log_header(config, size, limits).make_scheduler()
        warm_up(Engine(scheduler, InlineExecutor(runner, platform.synchronize), limits), platform)
        if model.group is not None:
            model.group.memory.post(EndPhase())

    masks = masks_of(config, platform, model, grammars)
    return room_for_kv(config, platform, model, limits.max_model_len, masks, drive, adapters, vision)


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
        kv_bytes=memory.kv_bytes,
        weight_bytes=model.weight_bytes + (0 if model.draft is None else model.draft.weight_bytes),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_budget,
        num_threads=model.num_threads,
        threads_reason=_ranks_reason(config) + model.threads_reason,
        seconds=seconds,
        weights_source=model.weights.source,
        kv_windows=describe_windows(model.window_obstacle, model.page_bytes, size, config.page_size),
        num_states=size.num_states,
        state_bytes=0 if memory.states is None else memory.states.num_bytes,
    )


def _ranks_reason(config: EngineConfig) -> str:
    """Return a prefix that says how many ranks share the model; "": only one."""
    size = config.num_ranks
    return "" if size == 1 else f"of each of {size} ranks, as weights and KV: "


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
    header = LogHeader.of(config, size.num_pages, size.max_model_len, limits.vocab_size, eos, size.num_states)
    header.window = size.window
    return header


def grammar_cache(config: EngineConfig, folder: Path, limits: ModelLimits) -> GrammarCache:
    """Return the cache that compiles grammars for this model's tokenizer; the compiler loads with the first grammar."""
    options = config.structured_outputs()
    tokenizer = GrammarTokenizer(
        path=str(Path(config.tokenizer or folder) / "tokenizer.json"),
        vocab_size=limits.vocab_size,
        eos_token_ids=tuple(sorted(limits.eos_token_ids)),
    )
    return GrammarCache(tokenizer, Limits(options.compile_seconds, options.compile_bytes), options.cache_bytes)
