"""Size the KV cache: how many pages it has and how long a request may be.

Knows numbers of bytes, no devices.
"""

from __future__ import annotations

import dataclasses
import math

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.engine.kv.page_pool import RESERVED_PAGES
from tokenmill.engine.kv.window_pages import WindowSettings

MIB = 1 << 20
# Below this a pool is no use to anyone; `--max-model-len auto` does not shrink further.
SMALLEST_CONTEXT = 64


def pages_in(num_bytes: int, bytes_per_page: int) -> int:
    """Return the pages of a KV cache of this many bytes; below 0 if not even page 0 fits."""
    return num_bytes // bytes_per_page - RESERVED_PAGES


def bytes_of(num_pages: int, bytes_per_page: int) -> int:
    """Return the bytes of a KV cache of this many pages."""
    return (num_pages + RESERVED_PAGES) * bytes_per_page


class KVSize(msgspec.Struct, frozen=True):
    """The decision: pages, the context length they support, and recurrent states (0: the model has none).

    Attributes:
        window: the window group, if there is one.
        num_scratch: pages that requests have for a step alone, of a model that keeps no KV: then there are no others.
    """

    num_pages: int
    max_model_len: int
    num_states: int = 0
    window: WindowSettings | None = None
    num_scratch: int = 0

    @property
    def keeps_kv(self) -> bool:
        """False if no request holds pages between steps."""
        return not self.num_scratch

    @property
    def num_allocated(self) -> int:
        """Number of pages in memory."""
        return self.num_pages + RESERVED_PAGES + self.num_scratch

    @property
    def num_allocated_windows(self) -> int:
        """Number of pages in the memory of the window group; 0: no window group."""
        return 0 if self.window is None else self.window.num_pages + RESERVED_PAGES


def wanted_context(config: EngineConfig, max_position: int) -> int:
    """Return the length of the longest request in tokens, unless the KV cache turns out to be too small for it.

    Raises:
        InvalidConfig: it exceeds the model's context.
    """
    wanted = config.max_model_len or max_position
    if wanted > max_position:
        raise InvalidConfig(f"--max-model-len {wanted} exceeds the model's context of {max_position} tokens")
    return wanted


def least_kv_bytes(config: EngineConfig, max_position: int, bytes_per_page: int) -> int:
    """Return the bytes of the smallest usable KV cache: the config's own size, or the pages of one request, and the
    page for padding.
    """
    assert config.gpu_memory_utilization is not None, "the config is not resolved"
    if config.num_pages is not None:
        return bytes_of(config.num_pages, bytes_per_page)
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if config.kv_share_bytes is not None:
        return config.kv_share_bytes
    # A context that was not asked for shrinks to the memory there is.
    tokens = config.max_model_len or min(SMALLEST_CONTEXT, max_position)
    needed = bytes_of(-(-tokens // config.page_size), bytes_per_page)
    return math.ceil(needed / config.gpu_memory_utilization)


def scratch_size(config: EngineConfig, max_position: int) -> KVSize:
    """Return the size of a model that keeps no KV: pages for the tokens of a step, of which each request has its own.

    Raises:
        InvalidConfig: the context that is asked for exceeds the model's.
    """
    num_scratch = -(-config.step_budget // config.page_size) + config.max_num_seqs
    return KVSize(0, wanted_context(config, max_position), num_scratch=num_scratch)


def kv_share(config: EngineConfig, available_bytes: int) -> int:
    """Return the bytes for the KV cache: as many as the config asks for, else the share of this engine."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if config.kv_share_bytes is not None:
        return config.kv_share_bytes
    assert config.gpu_memory_utilization is not None, "the config is not resolved"
    # Engines beside this one take as much; on GPUs each has its own.
    num_sharers = config.replica[1] if config.device == "cpu" else 1
    return int(available_bytes * config.gpu_memory_utilization / num_sharers)


def beside_copies(
    config: EngineConfig, available_bytes: int, page_bytes: int, num_layers: int, num_devices: int
) -> tuple[EngineConfig, int]:
    """Leave room on each of several devices for what it has besides its part of the pages.

    That is a page 0 of its own, and while prompts run copies of a layer's pages: those it shows, and those of all.

    Args:
        page_bytes: of a device's page 0, beyond its part of one.

    Returns:
        The config and the free bytes that are left for pages.
    """
    left = max(0, available_bytes - page_bytes) * num_layers // (num_layers + 1 + num_devices)
    if config.kv_cache_memory_bytes is None:
        return config, left
    asked = max(1, config.kv_cache_memory_bytes - page_bytes)
    return dataclasses.replace(config, kv_cache_memory_bytes=asked), left


def decide_kv_size(
    config: EngineConfig, max_position: int, bytes_per_page: int, available_bytes: int, besides: int = 0
) -> KVSize:
    """Size the KV cache.

    `--num-pages` wins, then `--kv-cache-memory-bytes`, else the share of the memory that is free now that the weights
    are loaded; never more than `--max-num-seqs` requests of full length could use.

    Args:
        max_position: context length of the model in tokens.
        available_bytes: free memory of the device.
        besides: bytes that a request of the full context needs in addition to these pages.

    Raises:
        InvalidConfig: one full request does not fit; says what is needed and what to change.
    """
    wanted = wanted_context(config, max_position)
    pages_per_request = -(-wanted // config.page_size)
    if config.num_pages is not None:
        num_pages = config.num_pages
    elif config.kv_cache_memory_bytes is not None:
        num_pages = pages_in(config.kv_cache_memory_bytes, bytes_per_page)
    else:
        share = kv_share(config, available_bytes)
        num_pages = min(pages_in(share, bytes_per_page), pages_per_request * config.max_num_seqs)

    if num_pages >= pages_per_request:
        return KVSize(num_pages, wanted)
    capacity = max(num_pages, 0) * config.page_size
    if config.max_model_len is None and capacity >= min(SMALLEST_CONTEXT, wanted):
        return KVSize(num_pages, capacity)
    needed = bytes_of(pages_per_request, bytes_per_page) + besides
    # Only the flag that decides: raising the other would change nothing.
    raised = (
        f"--kv-cache-memory-bytes to {needed}" if config.num_pages is None else f"--num-pages to {pages_per_request}"
    )
    lowered = f", or lower --max-model-len to {capacity}" if capacity else ""
    raise InvalidConfig(
        f"the KV cache holds {capacity} tokens, one request of {wanted} tokens needs {pages_per_request} pages "
        f"({needed / MIB:,.3g} MiB): raise {raised}{lowered}"
    )
