"""Sliding windows: pages behind the window of a layer are given up, in a page group of their own."""

from __future__ import annotations

from typing import Self

from tokenmill.core.engine_messages import EngineReady
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.memory import StepMemory
from tokenmill.startup.sizing.window_size import describe_windows


class Windows(Capability):
    """Their pages are part of the size of the KV cache, and the scheduler makes its resource from that."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Take part if the model has layers with windows, even where these have to keep all pages."""
        return None if assembly.model.window_obstacle == "" else cls(assembly)

    def describe(self, ready: EngineReady, memory: StepMemory) -> None:
        """Tell how pages behind windows are handled."""
        model, page_size = self._assembly.model, self._assembly.config.page_size
        ready.kv_windows = describe_windows(model.window_obstacle, model.page_bytes, memory.size, page_size)
