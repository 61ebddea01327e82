"""List the formats in which this machine can hold a model: what its weights take, and what is left for requests."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.sizes import size_text
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.quantization.packed import UNQUANTIZED
from tokenmill.model.weights.loader import choose_formats, measure
from tokenmill.platform.protocol import Platform
from tokenmill.startup.machine.device import check, choose_backend, choose_kernels, within_budget
from tokenmill.startup.machine.torch_needs import check_torch
from tokenmill.startup.sizing.kv_size import pages_in, scratch_size, wanted_context
from tokenmill.startup.sizing.state_size import BYTES_OF
from tokenmill.startup.sizing.tower_size import TowerMemory, tower_memory

QUANTIZATIONS = ("none", "fp8", "int8", "int4")
# Tokens of the requests that the table counts, besides the longest that the model is made for.
CONTEXTS = (2048, 8192, 32768)


class Form(msgspec.Struct, frozen=True):
    """One format of a model's weights, and the memory that they and the KV cache take in it.

    Attributes:
        name: `bfloat16`, `int8` ..., or `as stored`.
        flags: those to add to the config that was asked for; empty: none.
        page_bytes: of a page of the KV cache, over all layers: pages behind windows are counted as if they were kept.
        tower: the part of a vision tower; its weights are included in `weight_bytes`.
    """

    name: str
    flags: str
    config: EngineConfig
    weight_bytes: int
    page_bytes: int
    tower: TowerMemory

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV that a token takes, over all layers."""
        return self.page_bytes / self.config.page_size

    def num_pages(self, free: int) -> int:
        """Return the number of KV pages that fit beside these weights; below 0 if not even page 0 fits.

        Args:
            free: bytes for weights and KV.
        """
        config, room = self.config, free - self.weight_bytes - self.tower.reserved
        assert config.gpu_memory_utilization is not None, "the config is not resolved"
        if config.num_pages is not None or config.kv_cache_memory_bytes is not None:
            asked = config.num_pages or pages_in(config.kv_cache_memory_bytes or 0, self.page_bytes)
            return min(asked, pages_in(room, self.page_bytes))
        return pages_in(int(room * config.gpu_memory_utilization), self.page_bytes)

    def num_requests(self, free: int, context: int) -> float:
        """Return how many requests of this many tokens the KV cache holds at a time."""
        return max(0, self.num_pages(free)) / -(-context // self.config.page_size)

    def tokens_per_second(self, architecture: Architecture, context: int, bandwidth: float) -> float:
        """Return the tokens per second of a single request: each step reads the decoder's weights and its KV once.

        Args:
            bandwidth: bytes per second.
        """
        read = (self.weight_bytes - self.tower.weights) * active_share(architecture) + context * self.kv_bytes_per_token
        return bandwidth / read


def active_share(architecture: Architecture) -> float:
    """Return the share of a model's parameters that the step of one request reads: not all experts, and one row of an
    embedding table that is no output head.
    """
    idle = 0 if architecture.tie_embeddings else architecture.vocab_size * architecture.hidden_size
    for layer in architecture.layers:
        if isinstance(layer.mlp, MoeSpec):
            idle += layer.mlp.num_idle_parameters(architecture.hidden_size)
    return 1 - idle / (architecture.num_parameters() - architecture.num_mapped_parameters)


def forms(
    config: EngineConfig, platform: Platform, folder: Path, architecture: Architecture, num_threads: int
) -> list[Form]:
    """Return the format that a config asks for, and the smaller ones that this machine has kernels for.

    Args:
        config: resolved for the platform.
        folder: has the model's config.json, which says whether it is quantized already.

    Raises:
        InvalidConfig: this machine cannot compute in the format asked for.
    """
    found = [form_of(config, "", platform, folder, architecture, num_threads)]
    for other, flags in _smaller_configs(config):
        try:
            found.append(form_of(other, flags, platform, folder, architecture, num_threads))
        except InvalidConfig:
            continue
    return found


def form_of(
    config: EngineConfig,
    flags: str,
    platform: Platform,
    folder: Path,
    architecture: Architecture,
    num_threads: int,
) -> Form:
    """Return the format that a config asks for; the arguments are those of `forms`, whose errors it raises.

    Args:
        flags: see `Form`.
    """
    check(config, platform)
    check_torch(config, architecture, platform)
    kernels, _ = choose_kernels(config, platform, folder, num_threads, architecture)
    shapes, weight_bytes = measure(architecture, within_budget(config, kernels, architecture))
    attention = choose_backend(config, platform, shapes.attention_spec, kernels)
    name = config.dtype if config.quantization == "none" else config.quantization
    if config.quantization == "none" and choose_formats(folder, None) != UNQUANTIZED:
        name = "as stored"
    tower = tower_memory(config, folder, BYTES_OF[config.dtype])
    page_bytes = attention.bytes_per_page + attention.bytes_per_window_page
    return Form(name, flags, config, weight_bytes + tower.weights, page_bytes, tower)


def _smaller_configs(config: EngineConfig) -> Iterator[tuple[EngineConfig, str]]:
    """Yield configs whose weights may be smaller, with the flags that make the difference."""
    dtype = "bfloat16" if config.dtype == "float32" else config.dtype
    for quantization in QUANTIZATIONS:
        changes = {"dtype": dtype, "quantization": quantization}
        flags = [f"--{name} {value}" for name, value in changes.items() if getattr(config, name) != value]
        if flags and "--quantization none" not in flags:
            yield dataclasses.replace(config, dtype=dtype, quantization=quantization), " ".join(flags)


def held_bytes(config: EngineConfig) -> int:
    """Return the bytes of weights that the engines of one server share in memory."""
    return os.stat(config.weight_memory).st_blocks * 512 if config.weight_memory else 0


def free_bytes(config: EngineConfig, platform: Platform, architecture: Architecture) -> int:
    """Return the bytes for weights and KV: free, or holding the weights already; on a GPU less what a step takes."""
    free = platform.available_bytes() + held_bytes(config)
    if platform.is_accelerator:
        from tokenmill.startup.machine.device_memory import workspace_bytes

        longest = wanted_context(config, architecture.max_position)
        free -= workspace_bytes(config, architecture, longest, BYTES_OF[config.dtype])
    return max(0, free)


def table(choices: Sequence[Form], architecture: Architecture, free: int, bandwidth: float | None = None) -> str:
    """Return the formats side by side, a line each below a line of titles.

    Args:
        free: bytes for weights and KV.
        bandwidth: bytes per second, for the last column; None: without it.
    """
    longest = wanted_context(choices[0].config, architecture.max_position)
    if not architecture.needs_kv:
        return _encoder_table(choices, longest)
    contexts = [*(context for context in CONTEXTS if context < longest), longest]
    counts = [f"{context:,}" for context in contexts]
    head = ["weights as", "memory", "KV a token", "KV cache", f"requests of {counts[0]}", *counts[1:]]
    rows = [head + (["tokens/s of one"] if bandwidth is not None else [])]
    for form in choices:
        pages = form.num_pages(free)
        row = [form.name, size_text(form.weight_bytes), size_text(form.kv_bytes_per_token)]
        row.append(size_text(pages * form.page_bytes) if pages > 0 else "no room")
        row += [_count_text(form.num_requests(free, context)) for context in contexts]
        if bandwidth is not None:
            row.append(f"{form.tokens_per_second(architecture, contexts[0], bandwidth):,.3g}")
        rows.append(row)
    return _aligned(rows)


def _encoder_table(choices: Sequence[Form], longest: int) -> str:
    """Return the same of a model that keeps no KV: keys and values of one layer at a time, in memory of a step."""
    rows = [["weights as", "memory", "memory of a step", "texts in a step"]]
    for form in choices:
        budget = max(form.config.step_budget, longest)
        size = scratch_size(dataclasses.replace(form.config, max_num_batched_tokens=budget), longest)
        scratch = size_text(size.num_allocated * form.page_bytes)
        rows.append([form.name, size_text(form.weight_bytes), scratch, f"up to {form.config.max_num_seqs:,}"])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _count_text(count: float) -> str:
    """Format a number of requests, rounded down, since it is a promise; a fraction of a request counts as none."""
    return f"{int(count):,}" if count >= 1 else "-"
