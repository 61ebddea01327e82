"""The scheduler that settings ask for, and its resources besides rows and pages."""

from __future__ import annotations

from tokenmill.config.engine_settings import SCHEDULER_PLUGINS
from tokenmill.core.plugins import find_class
from tokenmill.core.scheduling import SchedulerInterface
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.window_pages import WindowPages, WindowSettings
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.resources.adapter_slots import AdapterSlots
from tokenmill.engine.scheduler.resources.encoder_cache import EncoderCache, NoEncoder
from tokenmill.engine.scheduler.resources.resource import Resource
from tokenmill.engine.scheduler.resources.state_slots import StateSlots
from tokenmill.engine.scheduler.resources.windows import Windows
from tokenmill.engine.scheduler.scheduler import Scheduler

EngineScheduler = SchedulerInterface[KVManager]


def find_scheduler(name: str) -> type[EngineScheduler]:
    """Return the class of schedulers that `--scheduler-cls` names; "": ours.

    Raises:
        InvalidConfig: see `find_class`.
    """
    return find_class("--scheduler-cls", SCHEDULER_PLUGINS, name, SchedulerInterface) if name else Scheduler


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
