"""How many KV pages there are, and how long a request may be: arithmetic on bytes, no device involved."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidConfig
from tokenmill.models.architecture import Architecture

MIB = 1 << 20
# Below this a pool is no use to anyone; `--max-model-len auto` does not shrink further.
SMALLEST_CONTEXT = 64
DTYPE_BYTES = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4})
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVSize:
    """The decision: usable pages (the reserved one not counted) and the context length they support."""

    num_pages: int
    max_model_len: int


def kv_bytes_per_page(architecture: Architecture, config: EngineConfig) -> int:
    """Bytes of a page over all layers, in the type of the KV cache; int8 has a float32 scale per key and value."""
    if config.kv_cache_dtype == "int8":
        vectors = 2 * architecture.num_layers * architecture.num_kv_heads * config.page_size
        return vectors * (architecture.head_dim + SCALE_BYTES)
    return architecture.kv_bytes_per_page(config.page_size, DTYPE_BYTES[config.dtype])


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
    wanted = config.max_model_len or max_position
    if wanted > max_position:
        raise InvalidConfig(f"--max-model-len {wanted} exceeds the model's context of {max_position} tokens")
    pages_per_request = -(-wanted // config.page_size)
    if config.num_pages is not None:
        num_pages = config.num_pages
    elif config.kv_cache_memory_bytes is not None:
        num_pages = config.kv_cache_memory_bytes // bytes_per_page - 1
    else:
        share = int(available_bytes * config.gpu_memory_utilization)
        num_pages = min(share // bytes_per_page - 1, pages_per_request * config.max_num_seqs)

    if num_pages >= pages_per_request:
        return KVSize(num_pages, wanted)
    capacity = max(num_pages, 0) * config.page_size
    if config.max_model_len is None and capacity >= min(SMALLEST_CONTEXT, wanted):
        return KVSize(num_pages, capacity)
    needed = (pages_per_request + 1) * bytes_per_page
    # Only the flag that decides: raising the other would change nothing.
    raised = (
        f"--kv-cache-memory-bytes to {needed}" if config.num_pages is None else f"--num-pages to {pages_per_request}"
    )
    lowered = f", or lower --max-model-len to {capacity}" if capacity else ""
    raise InvalidConfig(
        f"the KV cache holds {capacity} tokens, one request of {wanted} tokens needs {pages_per_request} pages "
        f"({needed / MIB:,.3g} MiB): raise {raised}{lowered}"
    )
