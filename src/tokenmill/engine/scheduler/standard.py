"""The resources of a scheduler besides rows and pages, as its settings ask for them."""

from __future__ import annotations

from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.window_pages import WindowPages, WindowSettings
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.resources.adapter_slots import AdapterSlots
from tokenmill.engine.scheduler.resources.encoder_cache import EncoderCache, NoEncoder
from tokenmill.engine.scheduler.resources.resource import Resource
from tokenmill.engine.scheduler.resources.state_slots import StateSlots
from tokenmill.engine.scheduler.resources.windows import Windows


def standard_resources(
    config: SchedulerConfig, kv: KVManager, window: WindowSettings | None = None, depth: int = 1
) -> list[Resource]:
    """Return the resources of a scheduler over `kv`, in the order in which a request takes them.

    Args:
        window: of a group of pages for layers with a window; None: all pages are kept.
        depth: steps that may be launched before the first of them is committed.
    """
    resources: list[Resource] = []
    if window is not None:
        most_ahead = depth * config.max_num_batched_tokens
        resources.append(Windows(kv, WindowPages(window, kv.page_size, kv.pool.num_pages, most_ahead)))
    if config.state_slots:
        resources.append(StateSlots(kv, config.state_slots, config.enable_chunked_prefill))
    if config.max_loras:
        resources.append(AdapterSlots(config.max_loras, config.lora_patience))
    resources.append(EncoderCache(config) if config.encoder_budget else NoEncoder())
    return resources
