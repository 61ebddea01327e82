"""KV events: report what the prefix cache takes in and gives up."""

from __future__ import annotations

from typing import Self

from tokenmill.core.extension import EngineExtension
from tokenmill.engine.kv.events import KVEventLog
from tokenmill.engine.scheduler.scheduler import Scheduler
from tokenmill.startup.assembly.capability import Assembly, Capability


class KVEvents(Capability):
    """The engine's process publishes the events; see `Engine.take_kv_events`."""

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Turn events on if the config publishes them."""
        return None if assembly.config.kv_events() is None else cls()

    def engine_extensions(self, scheduler: Scheduler) -> tuple[EngineExtension, ...]:
        """Give the cache its log; the loop itself has nothing to do."""
        scheduler.kv.cache.events = KVEventLog()
        return ()
