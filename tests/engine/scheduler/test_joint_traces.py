"""Everything at once: background, priorities, tenants, drafts, late masks, adapters, images, sessions, failing steps;
and one of windows, recurrent states and KV from elsewhere, which an engine does not have together.

Every invariant after every step: the books of all owners, no page given away that somebody may still touch
(`page_uses.py`), a plan that is not empty while somebody could run, the bound on the steps of each request, its answer.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from tests.engine.scheduler.harness import Harness, Settings
from tests.engine.scheduler.test_late_samples import LateRunner
from tests.engine.scheduler.test_media import contents, prompt_of
from tests.engine.scheduler.test_random_traces import SchedulerTrace, prompts, tenants
from tests.engine.transfer.fake_source import TransferHarness
from tests.tiers import scaled
from tokenmill.core.request import CacheKey
from tokenmill.engine.kv.window_pages import WindowSettings, most_window_pages, num_pages_ahead

BESIDES = ["nothing", "windows", "states", "transfers"]


def draw_settings(rng: random.Random, besides: str) -> Settings:
    """A small engine that has everything, and one of `BESIDES`."""
    page_size = rng.choice([1, 2, 4])
    num_pages = rng.randint(12, 24)
    drawn = Settings(
        num_pages,
        page_size,
        max_num_seqs=rng.randint(1, 5),
        budget=rng.randint(6, 20),
        threshold=rng.choice([0, 0, 3]),
        policy=rng.choice(["fair", "fcfs", "priority"]),
        batch_policy=rng.choice(["mixed", "decode-first", "prefill-first"]),
        admission=rng.choice(["whole-prompt", "optimistic", "reserve"]),
        depth=rng.choice([1, 2, 4]),
        num_stages=rng.choice([1, 1, 1, 2]),
        drafts=0 if besides == "states" else rng.choice([0, 4]),
        max_model_len=min(32, num_pages * page_size),
        eos=frozenset(rng.sample(range(50), rng.randint(0, 4))),
        max_loras=rng.randint(1, 3),
        lora_patience=rng.randint(1, 6),
        patience=rng.randint(2, 8),
        encoder_budget=rng.randint(6, 12),
        encoder_cache_tokens=rng.randint(6, 16),
    )
    drawn.depth = max(drawn.depth, drawn.num_stages)
    if besides == "windows":
        window = rng.randint(1, 9)
        count = rng.randint(1, 3) * most_window_pages(window, page_size)
        drawn.window = WindowSettings(window, count + num_pages_ahead(drawn.depth * drawn.budget, page_size))
    if besides == "states":
        drawn.state_slots = drawn.max_num_seqs + rng.choice([0, 0, 1, 2, 8])
    return drawn


def make_harness(rng: random.Random, besides: str, share_of_late: float) -> Harness:
    """An engine whose masks are late now and then."""
    drawn = draw_settings(rng, besides)
    harness = TransferHarness(drawn, rng, rng.choice([0.0, 0.2])) if besides == "transfers" else Harness(drawn)
    LateRunner(harness, rng, share_of_late)
    return harness


class JointTrace(SchedulerTrace):
    """Random requests of all kinds over all kinds of resources at once."""

    @initialize(
        seed=st.integers(0, 2**32), besides=st.sampled_from(BESIDES), share_of_late=st.sampled_from([0.0, 0.1, 0.4])
    )
    def start(self, seed: int, besides: str, share_of_late: float) -> None:  # type: ignore[override]
        self.held: list[str] = []
        self.harness = make_harness(random.Random(seed), besides, share_of_late)

    @rule(
        parts=st.lists(st.one_of(st.integers(0, 2), contents), min_size=1, max_size=5),
        max_tokens=st.integers(1, 8),
        priority=st.integers(-1, 1),
        tenant=tenants,
        lower=st.booleans(),
    )
    def add_with_images(
        self, parts: list[int | tuple[str, int]], max_tokens: int, priority: int, tenant: str, lower: bool
    ) -> None:
        # A content has one length.
        lengths = [part if isinstance(part, int) else (f"{part[0]}{part[1]}", part[1]) for part in parts]
        prompt, media = prompt_of([*lengths, 1])
        self.harness.add(prompt, max_tokens, media=media, priority=priority, tenant=tenant, is_background=lower)

    @rule(prompt=prompts, max_tokens=st.integers(1, 8), adapter=st.integers(0, 5), lower=st.booleans())
    def open_session_with_adapter(self, prompt: list[int], max_tokens: int, adapter: int, lower: bool) -> None:
        request_id = self.harness.add(prompt, max_tokens, is_resumable=True, adapter=adapter, is_background=lower)
        self.harness.sessions[request_id] = []

    @rule(prompt=prompts, max_tokens=st.integers(1, 8), salt=st.sampled_from(["", "s"]), lower=st.booleans())
    def add_one_that_a_peer_has(self, prompt: list[int], max_tokens: int, salt: str, lower: bool) -> None:
        if isinstance(self.harness, TransferHarness):
            self.harness.sources[0].put(CacheKey("", salt), prompt)
            self.harness.add(prompt, max_tokens, salt=salt, is_background=lower, kv_transfer_params={"keep": lower})


TestJointTrace = JointTrace.TestCase
TestJointTrace.settings = settings(
    max_examples=scaled(30), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def add_one(harness: Harness, rng: random.Random, is_last: bool) -> str:
    """A request of any kind; `is_last`: of the worst class."""
    prompt = [rng.randrange(3) for _ in range(rng.randint(1, 20))]
    more: dict[str, object] = {}
    kind = rng.choice(["plain", "plain", "adapter", "image", "logprobs"])
    if kind == "adapter":
        more["adapter"] = rng.randrange(6)
    if kind == "image":
        length = rng.randint(1, 6)
        prompt, more["media"] = prompt_of([*prompt[:10], (f"{rng.choice('abc')}{length}", length), 1])
    if kind == "logprobs":
        more["prompt_logprobs"] = 1
    if isinstance(harness, TransferHarness) and kind == "plain" and rng.random() < 0.3:
        harness.sources[0].put(CacheKey(), prompt)
    is_background = is_last and (harness.settings.policy == "fcfs" or rng.random() < 0.5)
    priority = 9 if is_last else rng.randint(-1, 1)
    tenant = str(rng.randrange(4) if is_last else rng.randrange(10**6))
    return harness.add(
        prompt,
        rng.choice([1, rng.randint(1, 10)]),
        priority=priority,
        tenant=tenant,
        is_background=is_background,
        **more,
    )


@pytest.mark.parametrize("besides", BESIDES)
def test_nobody_starves_in_a_flood_of_everything(besides: str) -> None:
    """Three of the worst class, among a flood of better ones that ends only with them. `Harness.step` has the bound."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(8):
        harness = make_harness(rng, besides, rng.choice([0.0, 0.1]))
        watched = [add_one(harness, rng, is_last=True) for _ in range(3)]
        while any(harness.records[one].finish_reason is None for one in watched):
            while len(harness.scheduler.state.waiting) < 6:
                add_one(harness, rng, is_last=False)
            harness.step()
        harness.drain()
