"""The random traces of the scheduler, with sources that are late, lose, repeat and lie: no token differs, all ends."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.engine.scheduler.harness import Harness, Settings
from tests.engine.scheduler.test_random_traces import SchedulerTrace, prompts
from tests.engine.transfer.fake_source import TransferHarness
from tests.tiers import scaled
from tokenmill.core.request import CacheKey
from tokenmill.core.transfers import Export
from tokenmill.engine.kv.window_pages import WindowSettings, most_window_pages, num_pages_ahead

ANY: dict[str, st.SearchStrategy[object]] = {
    "page_size": st.sampled_from([1, 2, 4]),
    "max_num_seqs": st.integers(1, 5),
    "policy": st.sampled_from(["fair", "fcfs", "priority"]),
    "admission": st.sampled_from(["whole-prompt", "optimistic", "reserve"]),
    "depth": st.sampled_from([1, 2, 4]),
    "eos": st.frozensets(st.integers(0, 49), max_size=6),
    "seed": st.integers(0, 2**32),
    "trouble": st.sampled_from([0.0, 0.1, 0.4]),
}


class TransferTrace(SchedulerTrace):
    """Requests whose KV is elsewhere, stored, kept and lost."""

    harness: TransferHarness

    @initialize(
        **ANY,
        num_pages=st.integers(8, 20),
        budget=st.integers(5, 24),
        threshold=st.sampled_from([0, 0, 3]),
        batch_policy=st.sampled_from(["mixed", "decode-first", "prefill-first"]),
        drafts=st.sampled_from([0, 0, 4]),
        least_copied=st.sampled_from([0, 1, 2]),
    )
    def start(self, num_pages: int, page_size: int, **overrides: object) -> None:
        self.begin_with_sources(num_pages, page_size, **overrides)

    def begin_with_sources(self, num_pages: int, page_size: int, **overrides: object) -> None:
        self.generator = random.Random(overrides.pop("seed"))  # type: ignore[arg-type]
        self.trouble = overrides.pop("trouble")
        self.begin(num_pages, page_size, **overrides)

    def make_harness(self, settings: Settings) -> Harness:
        return TransferHarness(settings, self.generator, self.trouble)  # type: ignore[arg-type]

    @rule(prompt=prompts, max_tokens=st.integers(1, 8), salt=st.sampled_from(["", "s"]), keep=st.booleans())
    def add_one_that_a_peer_has(self, prompt: list[int], max_tokens: int, salt: str, keep: bool) -> None:
        self.harness.sources[0].put(CacheKey("", salt), prompt)  # type: ignore[arg-type]
        self.harness.add(prompt, max_tokens, salt=salt, kv_transfer_params={"keep": keep})

    @rule(prompt=prompts, max_tokens=st.integers(1, 3))
    def add_one_to_keep(self, prompt: list[int], max_tokens: int) -> None:
        self.harness.add(prompt, max_tokens, kv_transfer_params={"keep": True})

    @rule(prompt=prompts, of_prompt=st.integers(0, 24), salt=st.sampled_from(["", "s"]))
    def export_what_is_cached(self, prompt: list[int], of_prompt: int, salt: str) -> None:
        """As an operator saves a conversation: a source reads it, whatever is stored of it."""
        export = Export("peer", "", CacheKey("", salt), prompt, min(of_prompt, len(prompt)))
        self.harness.engine.apply_transfer_events([export])


class StateTransferTrace(TransferTrace):
    """The same for a model with recurrent states, which are stored, loaded and lost with their pages."""

    @initialize(
        **ANY,
        num_pages=st.integers(8, 20),
        spare=st.integers(0, 8),
        budget=st.integers(5, 24),
    )
    def start(self, num_pages: int, page_size: int, spare: int, max_num_seqs: int, **overrides: object) -> None:
        slots = max_num_seqs + spare
        self.begin_with_sources(num_pages, page_size, max_num_seqs=max_num_seqs, state_slots=slots, **overrides)


class WindowTransferTrace(TransferTrace):
    """The same for a model with a window group, whose pages are promised to loads, read by saves, and run short."""

    @initialize(
        **ANY,
        num_pages=st.integers(12, 40),
        window=st.integers(1, 9),
        num_windows=st.integers(1, 3),
        num_for_saves=st.integers(0, 10),
        is_ample=st.sampled_from([False, False, False, True]),
        budget=st.integers(5, 12),
        drafts=st.sampled_from([0, 0, 4]),
        least_copied=st.sampled_from([0, 1, 2]),
    )
    def start(  # type: ignore[override]
        self,
        num_pages: int,
        page_size: int,
        window: int,
        num_windows: int,
        num_for_saves: int,
        is_ample: bool,
        **overrides: object,
    ) -> None:
        self.generator = random.Random(overrides.pop("seed"))  # type: ignore[arg-type]
        self.trouble = overrides.pop("trouble")
        self.held: list[str] = []
        made = Settings(num_pages, page_size, **overrides)  # type: ignore[arg-type]
        made.max_model_len = min(32, num_pages * page_size)
        num_window_pages = num_windows * most_window_pages(window, page_size) + num_for_saves
        num_window_pages += num_pages_ahead(made.depth * made.budget, page_size)
        made.window = WindowSettings(window, num_pages if is_ample else num_window_pages, num_for_saves)
        self.harness = self.make_harness(made)  # type: ignore[assignment]


SETTINGS = settings(
    max_examples=scaled(30), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestTransferTrace = TransferTrace.TestCase
TestTransferTrace.settings = SETTINGS
TestStateTransferTrace = StateTransferTrace.TestCase
TestStateTransferTrace.settings = SETTINGS
TestWindowTransferTrace = WindowTransferTrace.TestCase
TestWindowTransferTrace.settings = SETTINGS
