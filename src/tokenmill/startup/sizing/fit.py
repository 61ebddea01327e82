"""Check whether a model fits the free memory, before the first byte of its weights is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import OutOfMemory
from tokenmill.core.sizes import size_text
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.weights.loader import ModelPlan
from tokenmill.platform.protocol import Platform
from tokenmill.startup.sizing.forms import Form, forms, free_bytes, held_bytes, table
from tokenmill.startup.sizing.kv_size import SMALLEST_CONTEXT, bytes_of, least_kv_bytes, pages_in
from tokenmill.startup.sizing.state_size import BYTES_OF, bytes_per_state
from tokenmill.startup.sizing.tower_size import tower_memory

# Of a parameter in the smallest form that weights are kept in: four bits, not counting their scales.
LEAST_BYTES_PER_PARAMETER = 0.5


def check_parameters(config: EngineConfig, platform: Platform, architecture: Architecture) -> None:
    """Refuse a model that is far too large by its number of parameters alone, before its decoder is laid out.

    Raises:
        OutOfMemory: one sentence with the numbers.
    """
    free = platform.available_bytes() + held_bytes(config)
    count = architecture.num_parameters() - architecture.num_mapped_parameters
    if count * LEAST_BYTES_PER_PARAMETER > free:
        weights = size_text(count * BYTES_OF[config.dtype])
        raise OutOfMemory(
            f"the model has {count / 1e9:,.4g} billion parameters, {weights} in {config.dtype}, and {size_text(free)} "
            "of memory are free; no --quantization makes it fit, take a smaller one"
        )


def check_fit(
    config: EngineConfig, platform: Platform, folder: Path, plan: ModelPlan, page_bytes: int, num_threads: int
) -> None:
    """Refuse a model whose weights and smallest KV cache exceed the free memory.

    Args:
        plan, page_bytes: of the model and of a page of the KV cache, or of a rank's part of them.

    Raises:
        OutOfMemory: one sentence with the numbers and what would fit.
    """
    architecture = plan.shapes.architecture
    free = free_bytes(config, platform, architecture)
    # Its ranks load at the same time, each as much as the others; on GPUs each into memory of its own.
    size = 1 if platform.is_accelerator else config.num_ranks_here
    tower = tower_memory(config, folder, BYTES_OF[config.dtype])
    # Those that share a context map one file of packed weights.
    is_mapped = plan.kernels.name == "native" and (config.weight_cache or config.weight_memory)
    copies = 1 if config.context_parallel_size > 1 and is_mapped else size
    all_weights = copies * plan.weight_bytes + tower.weights
    fit = _Fit(config, architecture, free, size * plan.spare_bytes, size * page_bytes, tower.reserved)
    if fit.total(all_weights) <= free:
        return
    choices = forms(config, platform, folder, architecture, num_threads)
    needed, weights = size_text(fit.total(all_weights)), size_text(all_weights)
    advice = ", or ".join(_advice(fit, choices))
    raise OutOfMemory(
        f"the model needs {needed} of memory and {size_text(free)} are free: its weights take {weights}, its "
        f"KV cache at least {size_text(fit.least_kv)}; "
        + (f"what fits: {advice}" if advice else "take a smaller model, no flag makes this one fit")
        + f"\n{table(choices, architecture, free)}"
    )


class _Fit(msgspec.Struct, frozen=True):
    """The memory that a config needs besides its weights.

    Attributes:
        free: free bytes.
        spare: bytes that loading takes besides the weights, before the KV cache is allocated.
        page_bytes: of a page of the KV cache.
        encodings: bytes for the outputs of a vision tower.
    """

    config: EngineConfig
    architecture: Architecture
    free: int
    spare: int
    page_bytes: int
    encodings: int

    @property
    def least_kv(self) -> int:
        return least_kv_bytes(self.config, self.architecture.max_position, self.page_bytes)

    @property
    def states(self) -> int:
        """Bytes of recurrent states: as many as the config asks for, or those of one state."""
        return self.config.state_memory or bytes_per_state(self.config, self.architecture)

    def total(self, weights: int) -> int:
        """Return the most bytes that are taken at a time."""
        return weights + max(self.spare, self.least_kv + self.states + self.encodings)

    def smaller_kv(self, weights: int) -> str | None:
        """Return the flag that makes the KV cache fit beside these weights; "": it fits, None: no flag helps."""
        if self.total(weights) <= self.free:
            return ""
        config, room = self.config, self.free - weights - self.states - self.encodings
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


def _advice(fit: _Fit, choices: Sequence[Form]) -> list[str]:
    """Return the flags that would make it fit: a smaller KV cache, smaller weights, or both if one is not enough."""
    alone, together = [], []
    asked, *others = choices
    if flag := fit.smaller_kv(asked.weight_bytes):
        alone.append(flag)
    for other in others:
        smaller = f"{other.flags} ({size_text(other.weight_bytes)} of weights)"
        room = msgspec.structs.replace(fit, config=other.config, page_bytes=other.page_bytes)
        flag = room.smaller_kv(other.weight_bytes)
        if flag == "":
            alone.append(smaller)
        elif flag is not None:
            together.append(f"{smaller} with {flag}")
    return alone or together
