"""Puts a scheduler and its KV bookkeeping together; for the engine, for replays and for simulations alike."""

from __future__ import annotations

from tokenmill.kv.events import KVEventLog
from tokenmill.kv.kv_manager import KVManager
from tokenmill.kv.page_pool import PagePool
from tokenmill.kv.prefix_cache import NullCache
from tokenmill.kv.radix_tree import RadixTree
from tokenmill.scheduler.config import SchedulerConfig
from tokenmill.scheduler.scheduler import Scheduler


def make_scheduler(
    config: SchedulerConfig,
    num_pages: int,
    page_size: int,
    enable_prefix_caching: bool,
    events: KVEventLog | None = None,
) -> Scheduler:
    """A scheduler over `num_pages` usable pages; the reserved page 0 comes on top.

    Args:
        events: gets what the prefix cache takes in and gives up.
    """
    cache = RadixTree(page_size, events) if enable_prefix_caching else NullCache(page_size)
    return Scheduler(config, KVManager(PagePool(num_pages + 1), cache, page_size))
