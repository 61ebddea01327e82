"""From a config to a running engine: finds the model, reads it, sizes the KV cache and puts the parts together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenmill.attention.protocol import AttentionBackend
from tokenmill.attention.select import select
from tokenmill.config import EngineConfig
from tokenmill.engine.accelerator import capture_graphs, check, gpu_kernels, workspace_bytes
from tokenmill.engine.engine import Engine, ModelLimits
from tokenmill.engine.kv_size import KVSize, decide_kv_size, kv_bytes_per_page
from tokenmill.engine.parts import make_scheduler
from tokenmill.engine.step_log import LogHeader, StepLog
from tokenmill.engine.threads import choose_threads
from tokenmill.errors import InvalidConfig
from tokenmill.kernels.protocol import Kernels
from tokenmill.kernels.select import select_kernels
from tokenmill.kv.events import KVEventLog
from tokenmill.messages import AddRequest, EngineReady
from tokenmill.model_files import eos_token_ids
from tokenmill.models.decoder import Decoder
from tokenmill.platform.protocol import Platform
from tokenmill.platform.select import select_platform
from tokenmill.runner.model_runner import ModelRunner
from tokenmill.runner.row_tables import RowTables
from tokenmill.sampling.grammar_rows import GrammarRows
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.table import SamplingTable
from tokenmill.sampling_params import SamplingParams
from tokenmill.scheduler.config import SchedulerConfig
from tokenmill.scheduler.scheduler import Scheduler
from tokenmill.structured.compiler import GrammarTokenizer
from tokenmill.structured.store import GrammarStore
from tokenmill.structured.trial import Limits
from tokenmill.weights.checkpoint import read_architecture
from tokenmill.weights.hub import fetch
from tokenmill.weights.loader import load_model
from tokenmill.weights.stored_formats import choose_formats

Progress = Callable[[str, int, int], None]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, and the description of it that the other processes get."""

    engine: Engine
    ready: EngineReady


class Phases:
    """Seconds of each start-up phase, and the way to tell how far one is."""

    def __init__(self, report: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._report = report

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Time a phase; yields the function that reports `done, total` within it."""
        start = time.perf_counter()
        self._report(name, 0, 0)
        yield lambda done, total: self._report(name, done, total)
        self.seconds[name] = time.perf_counter() - start


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
    with phases.phase("finding the model") as progress:
        folder = fetch(config.model, config.revision, config.download_dir, progress)
        architecture = read_architecture(folder)
    dtype = DTYPES[config.dtype]
    weight_bytes = architecture.num_parameters() * dtype.itemsize
    num_threads, threads_reason = choose_threads(config, platform, weight_bytes)
    check(config, platform, dtype)
    if platform.is_accelerator:
        kernels, kernels_reason = gpu_kernels(config, platform, dtype)
    else:
        kernels, kernels_reason = _cpu_kernels(config, folder, num_threads)
    with phases.phase("loading weights") as progress:
        model = load_model(folder, architecture, kernels, config.load_format, progress)
    with phases.phase("allocating KV"):
        bytes_per_page = kv_bytes_per_page(architecture, config)
        available = platform.available_bytes()
        if platform.is_accelerator:
            available = max(0, available - workspace_bytes(config, architecture, dtype))
        size = decide_kv_size(config, architecture.max_position, bytes_per_page, available)
        device = torch.device(platform.device)
        # An accelerator has a row more: one that belongs to nobody, for padding.
        num_rows = config.max_num_seqs + platform.is_accelerator
        tables = RowTables(num_rows, size.max_model_len, config.page_size, device)
        sampling = SamplingTable(config.max_num_seqs, architecture.vocab_size, device)
        native = getattr(kernels, "native", None)
        attention, reason = _attention(config, platform, model, size.num_pages + 1, native)
    limits = ModelLimits(size.max_model_len, architecture.vocab_size, eos_token_ids(folder))
    grammars = grammar_store(config, folder, limits)
    masks = GrammarRows(grammars.template, architecture.vocab_size)
    if platform.is_accelerator:
        runner = _stream_runner(model, attention, tables, sampling, masks, platform)
    else:
        runner = ModelRunner(model, attention, tables, sampling, masks, overlap=bool(config.async_scheduling))
        runner.sampler = Sampler(native)
    if runner.can_capture and not config.enforce_eager:
        with phases.phase("capturing graphs") as progress:
            reason += ", " + capture_graphs(runner.capture, platform, progress)
    depth = 2 if config.async_scheduling else 1
    header = LogHeader(
        scheduler=scheduler_config(config, size),
        num_pages=size.num_pages,
        page_size=config.page_size,
        enable_prefix_caching=config.enable_prefix_caching,
        max_model_len=size.max_model_len,
        vocab_size=architecture.vocab_size,
        eos_token_ids=sorted(limits.eos_token_ids),
        depth=depth,
    )
    with phases.phase("warming up"):
        warm_up(Engine(_scheduler(header), runner, limits))
    events = KVEventLog() if config.kv_events() is not None else None
    log = StepLog(Path(config.step_log) if config.step_log else None, header)
    engine = Engine(_scheduler(header, events), runner, limits, depth, log, grammars)
    ready = EngineReady(
        model=str(folder),
        architecture=architecture.name,
        num_parameters=architecture.num_parameters(),
        dtype=config.dtype,
        device=platform.name,
        kernels=kernels.name,
        kernels_reason=kernels_reason,
        attention_backend=attention.name,
        attention_reason=reason,
        max_model_len=size.max_model_len,
        vocab_size=architecture.vocab_size,
        page_size=config.page_size,
        num_pages=size.num_pages,
        kv_bytes=(size.num_pages + 1) * bytes_per_page,
        weight_bytes=weight_bytes,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_threads=num_threads,
        threads_reason=threads_reason,
        seconds=phases.seconds,
    )
    return BuiltEngine(engine, ready)


def _cpu_kernels(config: EngineConfig, folder: Path, num_threads: int) -> tuple[Kernels, str]:
    """Kernels for a CPU, in the formats that the checkpoint or `--quantization` calls for."""
    wanted = None if config.quantization == "none" else config.quantization
    formats = choose_formats(folder, wanted)
    kernels, reason = select_kernels(config.kernels, "cpu", DTYPES[config.dtype], num_threads, formats)
    if wanted is not None and kernels.name != "native":
        raise InvalidConfig(f"--quantization {wanted} needs the native kernels: {reason}")
    return kernels, reason


def _attention(
    config: EngineConfig, platform: Platform, model: Decoder, num_pages: int, native: Any | None
) -> tuple[AttentionBackend, str]:
    """The attention backend with its KV memory, and why it was taken; page 0 is for padding."""
    spec, dtype, pages = model.attention_spec, DTYPES[config.dtype], (num_pages, config.page_size)
    if platform.is_accelerator:
        # Triton is imported where a GPU is: it takes a second.
        from tokenmill.attention.select_paged import select_paged

        return select_paged(config.attention_backend, platform, spec, pages, dtype, config.batch_invariant)
    kv_dtype = torch.int8 if config.kv_cache_dtype == "int8" else None
    return select(config.attention_backend, platform.device, spec, *pages, dtype, kv_dtype=kv_dtype, native=native)


def _stream_runner(
    model: Decoder,
    attention: AttentionBackend,
    tables: RowTables,
    sampling: SamplingTable,
    masks: GrammarRows,
    platform: Platform,
) -> ModelRunner:
    from tokenmill.attention.paged import PagedAttention
    from tokenmill.runner.stream_runner import StreamRunner

    assert isinstance(attention, PagedAttention), "a GPU has its attention over pages"
    return StreamRunner(model, attention, tables, sampling, masks, platform)


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
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < size.max_model_len:
        raise InvalidConfig(
            f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least the context ({size.max_model_len})"
        )
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
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
