"""Memory: how many KV pages there are and how long a request may be, what is taken for them, and whether a model fits.

That it does not fit is found out before the first byte of its weights is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenmill.attention.protocol import AttentionBackend, AttentionSpec
from tokenmill.attention.registry import AttentionChoice, AttentionConfig, choose_attention
from tokenmill.config import EngineConfig
from tokenmill.core.errors import InvalidConfig, OutOfMemory
from tokenmill.engine.device import DTYPES, check, choose_kernels
from tokenmill.kernels.protocol import Kernels
from tokenmill.kv.page_pool import RESERVED_PAGES
from tokenmill.models.architecture import Architecture
from tokenmill.platform.prefault import prefault
from tokenmill.platform.protocol import Platform
from tokenmill.runner.row_tables import RowTables
from tokenmill.sampling.state import SamplingState
from tokenmill.weights.loader import ModelPlan, measure

MIB = 1 << 20
# Below this a pool is no use to anyone; `--max-model-len auto` does not shrink further.
SMALLEST_CONTEXT = 64
# Of a parameter in the smallest form that weights are kept in: four bits, not counting their scales.
LEAST_BYTES_PER_PARAMETER = 0.5
QUANTIZATIONS = ("none", "fp8", "int8", "int4")


def pages_in(num_bytes: int, bytes_per_page: int) -> int:
    """Pages of a KV cache of so many bytes; less than 0 where not even page 0 fits."""
    return num_bytes // bytes_per_page - RESERVED_PAGES


def bytes_of(num_pages: int, bytes_per_page: int) -> int:
    """Bytes of a KV cache of so many pages."""
    return (num_pages + RESERVED_PAGES) * bytes_per_page


@dataclass(frozen=True, slots=True)
class KVSize:
    """The decision: pages, and the context length they support."""

    num_pages: int
    max_model_len: int

    @property
    def num_allocated(self) -> int:
        """Pages in memory."""
        return self.num_pages + RESERVED_PAGES


def wanted_context(config: EngineConfig, max_position: int) -> int:
    """The longest request in tokens, unless the KV cache turns out to be too small for it.

    Raises:
        InvalidConfig: the model is not made for so many.
    """
    wanted = config.max_model_len or max_position
    if wanted > max_position:
        raise InvalidConfig(f"--max-model-len {wanted} exceeds the model's context of {max_position} tokens")
    return wanted


def least_kv_bytes(config: EngineConfig, max_position: int, bytes_per_page: int) -> int:
    """Memory without which no KV cache of this config can be of use: what it asks for, or else a request's, and the
    page for padding."""
    assert config.gpu_memory_utilization is not None, "the config is not resolved"
    if config.num_pages is not None:
        return bytes_of(config.num_pages, bytes_per_page)
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    # A context that nobody asked for shrinks to what there is.
    tokens = config.max_model_len or min(SMALLEST_CONTEXT, max_position)
    needed = bytes_of(-(-tokens // config.page_size), bytes_per_page)
    return math.ceil(needed / config.gpu_memory_utilization)


def decide_kv_size(config: EngineConfig, max_position: int, bytes_per_page: int, available_bytes: int) -> KVSize:
    """Size the KV cache.

    `--num-pages` wins, then `--kv-cache-memory-bytes`, else the share of the memory that is free now that the weights
    are loaded; never more than `--max-num-seqs` requests of full length could use.

    Args:
        max_position: context length of the model in tokens.
        available_bytes: free memory of the device.

    Raises:
        InvalidConfig: one full request does not fit; says what is needed and what to change.
    """
    assert config.gpu_memory_utilization is not None, "the config is not resolved"
    wanted = wanted_context(config, max_position)
    pages_per_request = -(-wanted // config.page_size)
    if config.num_pages is not None:
        num_pages = config.num_pages
    elif config.kv_cache_memory_bytes is not None:
        num_pages = pages_in(config.kv_cache_memory_bytes, bytes_per_page)
    else:
        share = int(available_bytes * config.gpu_memory_utilization)
        num_pages = min(pages_in(share, bytes_per_page), pages_per_request * config.max_num_seqs)

    if num_pages >= pages_per_request:
        return KVSize(num_pages, wanted)
    capacity = max(num_pages, 0) * config.page_size
    if config.max_model_len is None and capacity >= min(SMALLEST_CONTEXT, wanted):
        return KVSize(num_pages, capacity)
    needed = bytes_of(pages_per_request, bytes_per_page)
    # Only the flag that decides: raising the other would change nothing.
    raised = (
        f"--kv-cache-memory-bytes to {needed}" if config.num_pages is None else f"--num-pages to {pages_per_request}"
    )
    lowered = f", or lower --max-model-len to {capacity}" if capacity else ""
    raise InvalidConfig(
        f"the KV cache holds {capacity} tokens, one request of {wanted} tokens needs {pages_per_request} pages "
        f"({needed / MIB:,.3g} MiB): raise {raised}{lowered}"
    )


def workspace_bytes(config: EngineConfig, architecture: Architecture, dtype: torch.dtype) -> int:
    """Memory that a step takes besides weights and KV: activations of the widest layer, and logits, twice over."""
    layers = architecture.layers
    widest = max(2 * (one.attention.q_size + one.attention.kv_size) + 3 * one.mlp.active_size for one in layers)
    per_token = 4 * architecture.hidden_size + widest
    logits = config.max_num_seqs * architecture.vocab_size * (4 + dtype.itemsize)
    return 2 * (config.step_budget * per_token * dtype.itemsize + logits)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """What steps work on: the tables of rows, and the KV cache, whose layout is the attention backend's."""

    size: KVSize
    tables: RowTables
    sampling: SamplingState
    attention: AttentionBackend


def allocate(
    config: EngineConfig, platform: Platform, architecture: Architecture, attention: AttentionChoice
) -> StepMemory:
    """Size the KV cache by what the loaded weights have left, and take it.

    Raises:
        InvalidConfig: one full request does not fit.
    """
    available = platform.available_bytes()
    if platform.is_accelerator:
        available = max(0, available - workspace_bytes(config, architecture, DTYPES[config.dtype]))
    size = decide_kv_size(config, architecture.max_position, attention.bytes_per_page, available)
    device = torch.device(platform.device)
    # An accelerator has a row more: one that belongs to nobody, for padding.
    num_rows = config.max_num_seqs + platform.is_accelerator
    tables = RowTables(num_rows, size.max_model_len, config.page_size, device)
    sampling = SamplingState(config.max_num_seqs, architecture.vocab_size)
    return StepMemory(size, tables, sampling, attention.make(size.num_allocated))


def choose_backend(config: EngineConfig, platform: Platform, spec: AttentionSpec, kernels: Kernels) -> AttentionChoice:
    """The attention that will serve; what cannot is refused, before any weights are read.

    Raises:
        InvalidConfig: see `choose_attention`.
    """
    kv_dtype = torch.int8 if config.kv_cache_dtype == "int8" else None
    wanted = AttentionConfig(
        spec,
        config.page_size,
        DTYPES[config.dtype],
        platform,
        kv_dtype,
        native=getattr(kernels, "native", None),
        is_invariant=config.batch_invariant,
    )
    return choose_attention(config.attention_backend, wanted)


def take_memory(config: EngineConfig, platform: Platform, attention: AttentionBackend) -> Iterator[None]:
    """Takes KV memory that was asked for by its size before it is used, a little at each turn.

    A share of the machine's memory is taken as it is used, and so is more than there is.
    """
    is_asked_for = config.kv_cache_memory_bytes is not None or config.num_pages is not None
    if platform.is_accelerator or not is_asked_for or attention.kv.num_bytes > platform.available_bytes():
        return iter(())
    return prefault(attention.kv.tensors)


def check_parameters(config: EngineConfig, platform: Platform, architecture: Architecture) -> None:
    """Refuse what is far too large by its number of parameters alone: a decoder of that size is not even laid out.

    Raises:
        OutOfMemory: one sentence with the numbers.
    """
    free, count = platform.available_bytes(), architecture.num_parameters()
    if count * LEAST_BYTES_PER_PARAMETER > free:
        weights = size_text(count * DTYPES[config.dtype].itemsize)
        raise OutOfMemory(
            f"the model has {count / 1e9:,.4g} billion parameters, {weights} in {config.dtype}, and {size_text(free)} "
            "of memory are free; no --quantization makes it fit, take a smaller one"
        )


def check_fit(
    config: EngineConfig, platform: Platform, folder: Path, plan: ModelPlan, page_bytes: int, num_threads: int
) -> None:
    """Refuse a model whose weights and least KV cache exceed the memory that is free.

    Args:
        page_bytes: of a page of the KV cache.

    Raises:
        OutOfMemory: one sentence with the numbers and what would fit.
    """
    architecture = plan.shapes.architecture
    free = platform.available_bytes()
    if platform.is_accelerator:
        free -= workspace_bytes(config, architecture, DTYPES[config.dtype])
    fit = _Fit(config, architecture, free, plan.spare_bytes, page_bytes)
    if fit.total(plan.weight_bytes) <= free:
        return
    needed, weights = size_text(fit.total(plan.weight_bytes)), size_text(plan.weight_bytes)
    advice = ", or ".join(_advice(fit, platform, folder, plan, num_threads))
    raise OutOfMemory(
        f"the model needs {needed} of memory and {size_text(max(0, free))} are free: its weights take {weights}, its "
        f"KV cache at least {size_text(fit.least_kv)}; "
        + (f"what fits: {advice}" if advice else "take a smaller model, no flag makes this one fit")
    )


@dataclass(frozen=True, slots=True)
class _Fit:
    """What a config needs besides its weights.

    Attributes:
        free: bytes that there are.
        spare: bytes that loading takes beside the weights, before there is a KV cache.
        page_bytes: of a page of the KV cache.
    """

    config: EngineConfig
    architecture: Architecture
    free: int
    spare: int
    page_bytes: int

    @property
    def least_kv(self) -> int:
        return least_kv_bytes(self.config, self.architecture.max_position, self.page_bytes)

    def total(self, weights: int) -> int:
        """The most that is taken at a time."""
        return weights + max(self.spare, self.least_kv)

    def smaller_kv(self, weights: int) -> str | None:
        """The flag that lets the KV cache fit beside these weights; empty: none is needed, None: none does it."""
        if self.total(weights) <= self.free:
            return ""
        config, room = self.config, self.free - weights
        assert config.gpu_memory_utilization is not None, "the config is not resolved"
        is_share = config.num_pages is None and config.kv_cache_memory_bytes is None
        pages = pages_in(int(room * config.gpu_memory_utilization) if is_share else room, self.page_bytes)
        tokens = pages * config.page_size
        if room < self.spare or tokens < min(SMALLEST_CONTEXT, self.architecture.max_position):
            return None
        if config.num_pages is not None:
            return f"--num-pages {pages}"
        if config.kv_cache_memory_bytes is not None:
            return f"--kv-cache-memory-bytes {bytes_of(pages, self.page_bytes)}"
        return f"--max-model-len {tokens}"


def _advice(fit: _Fit, platform: Platform, folder: Path, plan: ModelPlan, num_threads: int) -> list[str]:
    """Flags with which it would fit: a smaller KV cache, smaller weights, or both where neither is enough."""
    alone, together = [], []
    if flag := fit.smaller_kv(plan.weight_bytes):
        alone.append(flag)
    for other, flags in _smaller_forms(fit.config):
        try:
            check(other, platform, DTYPES[other.dtype])
            kernels, _ = choose_kernels(other, platform, folder, num_threads)
            attention = choose_backend(other, platform, plan.shapes.attention_spec, kernels)
        except InvalidConfig:
            continue
        weights = measure(fit.architecture, kernels)[1]
        smaller = f"{flags} ({size_text(weights)} of weights)"
        flag = dataclasses.replace(fit, config=other, page_bytes=attention.bytes_per_page).smaller_kv(weights)
        if flag == "":
            alone.append(smaller)
        elif flag is not None:
            together.append(f"{smaller} with {flag}")
    return alone or together


def _smaller_forms(config: EngineConfig) -> Iterator[tuple[EngineConfig, str]]:
    """Configs whose weights may be smaller, and the flags that make the difference."""
    dtype = "bfloat16" if config.dtype == "float32" else config.dtype
    for quantization in QUANTIZATIONS:
        changes = {"dtype": dtype, "quantization": quantization}
        flags = [f"--{name} {value}" for name, value in changes.items() if getattr(config, name) != value]
        if flags and "--quantization none" not in flags:
            yield dataclasses.replace(config, dtype=dtype, quantization=quantization), " ".join(flags)


def size_text(num_bytes: float) -> str:
    """A number of bytes as people read it."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(0, int(num_bytes).bit_length() - 1) // 10, len(units) - 1)
    return f"{num_bytes / 1024**power:,.1f} {units[power]}"
