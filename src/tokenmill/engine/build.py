"""From a config to a running engine: finds the model, reads it, sizes the KV cache and puts the parts together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenmill.config import EngineConfig
from tokenmill.engine.accelerator import capture_graphs, check
from tokenmill.engine.device_parts import DTYPES, StepMemory, allocate, choose_kernels, make_runner, take_memory
from tokenmill.engine.engine import Engine, ModelLimits
from tokenmill.engine.kv_size import KVSize, kv_bytes_per_page
from tokenmill.engine.parts import make_scheduler
from tokenmill.engine.phases import Phases, Progress
from tokenmill.engine.step_log import LogHeader, StepLog
from tokenmill.engine.threads import choose_threads
from tokenmill.errors import InvalidConfig
from tokenmill.kernels.protocol import Kernels
from tokenmill.kv.events import KVEventLog
from tokenmill.messages import AddRequest, EngineReady
from tokenmill.model_files import eos_token_ids
from tokenmill.models.architecture import Architecture
from tokenmill.models.decoder import Decoder
from tokenmill.platform.protocol import Platform
from tokenmill.platform.select import select_platform
from tokenmill.runner.model_runner import ModelRunner
from tokenmill.sampling.grammar_rows import GrammarRows
from tokenmill.sampling_params import SamplingParams
from tokenmill.scheduler.config import SchedulerConfig
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.structured.compiler import GrammarTokenizer
from tokenmill.structured.store import GrammarStore
from tokenmill.structured.trial import Limits
from tokenmill.weights.checkpoint import read_architecture
from tokenmill.weights.hub import fetch
from tokenmill.weights.loader import load_model


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, the description of it that the other processes get, and what is left to do while nobody waits."""

    engine: Engine
    ready: EngineReady
    idle_work: Iterator[None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights in memory, and what was chosen for it, each with the reason."""

    folder: Path
    architecture: Architecture
    decoder: Decoder
    kernels: Kernels
    kernels_reason: str
    weight_bytes: int
    num_threads: int
    threads_reason: str


def build_engine(
    config: EngineConfig, report: Progress = lambda *_: None, platform: Platform | None = None
) -> BuiltEngine:
    """Load a model and make an engine for it.

    Args:
        config: resolved.
        report: called with (phase, done, total) while it goes on.
        platform: where it runs, instead of what the config says.

    Raises:
        InvalidCheckpoint, InvalidConfig: what is wrong and what to change, in one sentence.
    """
    phases = Phases(report)
    platform = platform or select_platform(config.device)
    config = dataclasses.replace(config, device=platform.device).resolve()
    model = load(config, platform, phases)
    with phases.phase("allocating KV"):
        memory = allocate(config, platform, model.architecture, model.decoder, model.kernels)
    limits = ModelLimits(memory.size.max_model_len, model.architecture.vocab_size, eos_token_ids(model.folder))
    grammars = grammar_store(config, model.folder, limits)
    masks = GrammarRows(grammars.template, limits.vocab_size, on_host=not platform.is_accelerator)
    runner = make_runner(config, platform, model.decoder, model.kernels, memory, masks)
    graphs = _capture(config, platform, runner, phases)
    header = log_header(config, memory.size, limits)
    with phases.phase("warming up"):
        warm_up(Engine(_scheduler(header), runner, limits))
    events = KVEventLog() if config.kv_events() is not None else None
    log = StepLog(Path(config.step_log) if config.step_log else None, header)
    engine = Engine(_scheduler(header, events), runner, limits, header.depth, log, grammars)
    ready = describe(config, platform, model, memory, graphs, phases.seconds)
    return BuiltEngine(engine, ready, take_memory(config, platform, memory.attention))


def load(config: EngineConfig, platform: Platform, phases: Phases) -> LoadedModel:
    """Find a model, choose kernels and threads for it, and read its weights into their forms."""
    with phases.phase("finding the model") as progress:
        folder = fetch(config.model, config.revision, config.download_dir, progress)
        architecture = read_architecture(folder)
    dtype = DTYPES[config.dtype]
    weight_bytes = architecture.num_parameters() * dtype.itemsize
    num_threads, threads_reason = choose_threads(config, platform, weight_bytes)
    check(config, platform, dtype)
    kernels, kernels_reason = choose_kernels(config, platform, folder, num_threads)
    with phases.phase("loading weights") as progress:
        decoder = load_model(folder, architecture, kernels, config.load_format, progress)
    return LoadedModel(
        folder, architecture, decoder, kernels, kernels_reason, weight_bytes, num_threads, threads_reason
    )


def describe(
    config: EngineConfig,
    platform: Platform,
    model: LoadedModel,
    memory: StepMemory,
    graphs: str,
    seconds: dict[str, float],
) -> EngineReady:
    """What the other processes are told of an engine."""
    architecture, size = model.architecture, memory.size
    return EngineReady(
        model=str(model.folder),
        architecture=architecture.name,
        num_parameters=architecture.num_parameters(),
        dtype=config.dtype,
        device=platform.name,
        kernels=model.kernels.name,
        kernels_reason=model.kernels_reason,
        attention_backend=memory.attention.name,
        attention_reason=memory.attention_reason + graphs,
        max_model_len=size.max_model_len,
        vocab_size=architecture.vocab_size,
        page_size=config.page_size,
        num_pages=size.num_pages,
        kv_bytes=(size.num_pages + 1) * kv_bytes_per_page(architecture, config),
        weight_bytes=model.weight_bytes,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_budget,
        num_threads=model.num_threads,
        threads_reason=model.threads_reason,
        seconds=seconds,
    )


def _capture(config: EngineConfig, platform: Platform, runner: ModelRunner, phases: Phases) -> str:
    """Capture graphs where there are any; how many and what they took, to be added to a sentence."""
    if not runner.can_capture or config.enforce_eager:
        return ""
    with phases.phase("capturing graphs") as progress:
        return ", " + capture_graphs(runner.capture, platform, progress)


def log_header(config: EngineConfig, size: KVSize, limits: ModelLimits) -> LogHeader:
    """What a recorded schedule is replayed with.

    Raises:
        InvalidConfig: see `scheduler_config`.
    """
    return LogHeader(
        scheduler=scheduler_config(config, size),
        num_pages=size.num_pages,
        page_size=config.page_size,
        enable_prefix_caching=config.enable_prefix_caching,
        max_model_len=size.max_model_len,
        vocab_size=limits.vocab_size,
        eos_token_ids=sorted(limits.eos_token_ids),
        depth=2 if config.async_scheduling else 1,
    )


def grammar_store(config: EngineConfig, folder: Path, limits: ModelLimits) -> GrammarStore:
    """What compiles grammars for this model's tokenizer; it loads when the first one comes."""
    options = config.structured_outputs()
    tokenizer = GrammarTokenizer(
        path=str(Path(config.tokenizer or folder) / "tokenizer.json"),
        vocab_size=limits.vocab_size,
        eos_token_ids=tuple(sorted(limits.eos_token_ids)),
    )
    return GrammarStore(tokenizer, Limits(options.compile_seconds, options.compile_bytes), options.cache_bytes)


def scheduler_config(config: EngineConfig, size: KVSize) -> SchedulerConfig:
    """The scheduler's part of the config.

    Raises:
        InvalidConfig: without chunked prefill a step must hold the longest prompt.
    """
    if not config.enable_chunked_prefill and config.step_budget < size.max_model_len:
        raise InvalidConfig(
            f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least the context ({size.max_model_len})"
        )
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.step_budget,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.scheduling_policy,
        batch_policy=config.batch_policy,
        admission=config.admission,
        seed=config.seed,
    )


def _scheduler(header: LogHeader, events: KVEventLog | None = None) -> Scheduler:
    return make_scheduler(header.scheduler, header.num_pages, header.page_size, header.enable_prefix_caching, events)


def warm_up(engine: Engine) -> None:
    """Run one small request, so that the first client does not pay for what torch sets up on first use."""
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
    engine.add(AddRequest(id="warm-up", prompt_token_ids=[0] * min(8, engine.limits.max_model_len - 2), params=params))
    while engine.has_work:
        engine.step()
