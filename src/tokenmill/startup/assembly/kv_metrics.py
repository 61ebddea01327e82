"""Lives of KV pages in the prefix cache, as vLLM's metrics tell them: how long a page lived, how long it lay unused
before it was evicted, and how long after its last use it was used again.

A sample of the pages is watched, by their ids, when the cache takes them, finds them or gives them up: nothing is done
per token or per step, and for a page that is not watched nothing but the test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tokenmill.core.extension import EngineExtension
from tokenmill.core.histogram import Histogram
from tokenmill.engine.kv.kv_manager import CachedPages, KVManager
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.scheduler.resources.resource import Resource
from tokenmill.engine.scheduler.scheduler import EngineScheduler
from tokenmill.startup.assembly.capability import Capability

# One of so many pages is watched; vLLM's `--kv-cache-metrics-sample` is 0.01.
SAMPLE = 64
# Upper bounds in seconds, vLLM's.
BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)


class PageLife(msgspec.Struct):
    """When a watched page was stored, and when a request last began with it; seconds."""

    stored: float
    used: float


class PageLives(Resource):
    """Histograms of the lives of watched pages.

    Attributes:
        lifetime: seconds from being stored to eviction. idle: from the last use to eviction.
        reuse_gap: from one use to the next.
    """

    def __init__(self, sample: int = SAMPLE, clock: Callable[[], float] = time.monotonic) -> None:
        self.lifetime, self.idle, self.reuse_gap = (Histogram.with_bounds(BOUNDS) for _ in range(3))
        self._sample = sample
        self._clock = clock
        self._lives: dict[int, PageLife] = {}

    def watch(self, kv: KVManager) -> None:
        """Listen to a manager of pages."""
        kv.on_cached.append(self._stored)
        kv.on_matched.append(self._found)
        kv.on_evicted.append(self._evicted)
        if kv.on_replaced:  # the first listener lets pages go for copies; who only watches must not change that
            kv.on_replaced.append(self._replaced)

    def counts(self) -> Mapping[str, Any]:
        """Return the histograms, as fields of `EngineStats`."""
        return {"kv_lifetime": self.lifetime, "kv_idle": self.idle, "kv_reuse_gap": self.reuse_gap}

    def _watched(self, pages: Sequence[int] | np.ndarray) -> list[int]:
        numbers = np.asarray(pages, dtype=np.int32)
        sampled: list[int] = numbers[numbers % self._sample == 0].tolist()
        return sampled

    def _stored(self, cached: CachedPages) -> None:
        for page in self._watched(cached.pages[cached.num_known :]):
            now = self._clock()
            self._lives[page] = PageLife(now, now)

    def _found(self, match: PrefixMatch) -> None:
        for life in self._known(self._watched(match.pages)):
            now = self._clock()
            self.reuse_gap.add(now - life.used)
            life.used = now

    def _evicted(self, pages: list[int]) -> None:
        for page in self._watched(pages):
            life = self._lives.pop(page, None)
            if life is not None:
                now = self._clock()
                self.lifetime.add(now - life.stored)
                self.idle.add(now - life.used)

    def _replaced(self, old: list[int], new: list[int]) -> None:
        """Take copies for pages whose content is the same: these live on if they are watched."""
        for before, after in zip(old, new, strict=True):
            life = self._lives.pop(before, None)
            if life is not None and after % self._sample == 0:
                self._lives[after] = life

    def _known(self, pages: Iterable[int]) -> list[PageLife]:
        return [self._lives[page] for page in pages if page in self._lives]


class KVMetrics(Capability):
    """Every engine with a prefix cache tells of its pages."""

    def __init__(self) -> None:
        self._lives = PageLives()

    def resources(self) -> Sequence[Resource]:
        """Return the lives, for what they count."""
        return [self._lives]

    def engine_extensions(self, scheduler: EngineScheduler) -> Sequence[EngineExtension]:
        """Watch the scheduler's pages; the loop itself has nothing to do."""
        if scheduler.kv.shares_prefixes:
            self._lives.watch(scheduler.kv)
        return ()
