"""The randomized traces with a window group: its pages run short, go behind windows, are found and are evicted."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from tests.engine.scheduler.harness import Settings
from tests.engine.scheduler.test_random_traces import SchedulerTrace
from tests.tiers import scaled
from tokenmill.engine.kv.window_pages import WindowSettings, most_window_pages, num_pages_ahead


class WindowTrace(SchedulerTrace):
    """As `SchedulerTrace`, with a window group for one to three windows, or as large as the full one."""

    @initialize(
        num_pages=st.integers(12, 40),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 12),
        threshold=st.sampled_from([0, 0, 3]),
        caching=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["fair", "fcfs", "priority"]),
        batch_policy=st.sampled_from(["mixed", "decode-first", "prefill-first"]),
        admission=st.sampled_from(["whole-prompt", "optimistic", "reserve"]),
        depth=st.sampled_from([1, 1, 2, 4]),
        drafts=st.sampled_from([0, 0, 4]),
        eos=st.frozensets(st.integers(0, 49), max_size=6),
        max_loras=st.integers(1, 3),
        lora_patience=st.integers(1, 6),
        window=st.integers(1, 9),
        num_windows=st.integers(1, 3),
        is_ample=st.sampled_from([False, False, False, True]),
    )
    def start(  # type: ignore[override]
        self, num_pages: int, page_size: int, window: int, num_windows: int, is_ample: bool, **overrides: object
    ) -> None:
        self.held: list[str] = []
        settings = Settings(num_pages, page_size, **overrides)  # type: ignore[arg-type]
        settings.max_model_len = min(32, num_pages * page_size)
        num_window_pages = num_windows * most_window_pages(window, page_size)
        num_window_pages += num_pages_ahead(settings.depth * settings.budget, page_size)
        settings.window = WindowSettings(window, num_pages if is_ample else num_window_pages)
        self.harness = self.make_harness(settings)


TestWindowTrace = WindowTrace.TestCase
TestWindowTrace.settings = settings(
    max_examples=scaled(60),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
