"""The parts of an engine that depend on the device: kernels, memory with the attention over it, and the runner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenmill.attention.protocol import AttentionBackend
from tokenmill.attention.select import select
from tokenmill.config import EngineConfig
from tokenmill.engine.accelerator import gpu_kernels, workspace_bytes
from tokenmill.engine.kv_size import KVSize, decide_kv_size, kv_bytes_per_page
from tokenmill.errors import InvalidConfig
from tokenmill.kernels.protocol import Kernels
from tokenmill.kernels.select import select_kernels
from tokenmill.models.architecture import Architecture
from tokenmill.models.decoder import Decoder
from tokenmill.models.native_decoder import in_one_call
from tokenmill.platform.prefault import prefault
from tokenmill.platform.protocol import Platform
from tokenmill.runner.model_runner import ModelRunner
from tokenmill.runner.row_tables import RowTables
from tokenmill.sampling.grammar_rows import GrammarRows
from tokenmill.sampling.sampler import Sampler
from tokenmill.sampling.table import SamplingTable
from tokenmill.weights.stored_formats import choose_formats

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What steps work on: the tables of rows, and the KV cache, whose layout is the attention backend's.

    Attributes:
        attention_reason: why it is that backend.
    """

    size: KVSize
    tables: RowTables
    sampling: SamplingTable
    attention: AttentionBackend
    attention_reason: str


def choose_kernels(config: EngineConfig, platform: Platform, folder: Path, num_threads: int) -> tuple[Kernels, str]:
    """Kernels for the platform, in the formats that the checkpoint or `--quantization` calls for; and why.

    Raises:
        InvalidConfig: these weights cannot be multiplied here in the form that is asked for.
    """
    if platform.is_accelerator:
        return gpu_kernels(config, platform, DTYPES[config.dtype])
    wanted = None if config.quantization == "none" else config.quantization
    formats = choose_formats(folder, wanted)
    kernels, reason = select_kernels(config.kernels, "cpu", DTYPES[config.dtype], num_threads, formats)
    if wanted is not None and kernels.name != "native":
        raise InvalidConfig(f"--quantization {wanted} needs the native kernels: {reason}")
    return kernels, reason


def allocate(
    config: EngineConfig, platform: Platform, architecture: Architecture, model: Decoder, kernels: Kernels
) -> StepMemory:
    """Size the KV cache by what the loaded weights have left, and take it.

    Raises:
        InvalidConfig: one full request does not fit.
    """
    available = platform.available_bytes()
    if platform.is_accelerator:
        available = max(0, available - workspace_bytes(config, architecture, DTYPES[config.dtype]))
    size = decide_kv_size(config, architecture.max_position, kv_bytes_per_page(architecture, config), available)
    device = torch.device(platform.device)
    # An accelerator has a row more: one that belongs to nobody, for padding.
    num_rows = config.max_num_seqs + platform.is_accelerator
    tables = RowTables(num_rows, size.max_model_len, config.page_size, device)
    sampling = SamplingTable(config.max_num_seqs, architecture.vocab_size, device)
    attention, reason = _attention(config, platform, model, size.num_pages + 1, _native(kernels))
    return StepMemory(size, tables, sampling, attention, reason)


def take_memory(config: EngineConfig, platform: Platform, attention: AttentionBackend) -> Iterator[None]:
    """Takes KV memory that was asked for by its size before it is used, a little at each turn.

    A share of the machine's memory is taken as it is used, and so is more than there is.
    """
    kv = attention.kv
    is_asked_for = config.kv_cache_memory_bytes is not None or config.num_pages is not None
    if platform.is_accelerator or not is_asked_for or kv.keys.nbytes + kv.values.nbytes > platform.available_bytes():
        return iter(())
    return prefault([kv.keys, kv.values])


def make_runner(
    config: EngineConfig,
    platform: Platform,
    model: Decoder,
    kernels: Kernels,
    memory: StepMemory,
    masks: GrammarRows,
) -> ModelRunner:
    """What executes plans on the platform."""
    if platform.is_accelerator:
        return _stream_runner(model, memory, masks, platform)
    overlap = bool(config.async_scheduling)
    runner = ModelRunner(
        in_one_call(model, memory.attention), memory.attention, memory.tables, memory.sampling, masks, overlap=overlap
    )
    runner.sampler = Sampler(_native(kernels))
    return runner


def _native(kernels: Kernels) -> Any | None:
    """The native kernels behind a set of kernels, if it is theirs."""
    return getattr(kernels, "native", None)


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


def _stream_runner(model: Decoder, memory: StepMemory, masks: GrammarRows, platform: Platform) -> ModelRunner:
    from tokenmill.attention.paged import PagedAttention
    from tokenmill.runner.stream_runner import StreamRunner

    assert isinstance(memory.attention, PagedAttention), "a GPU has its attention over pages"
    return StreamRunner(model, memory.attention, memory.tables, memory.sampling, masks, platform)
