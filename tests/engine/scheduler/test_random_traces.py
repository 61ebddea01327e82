"""Randomized traces over tiny pools: every invariant after every step, every answer right, nothing left in use."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.engine.scheduler.harness import Harness, Settings
from tests.tiers import scaled
from tokenmill.core.request import RequestStatus

# A small alphabet makes shared prefixes common.
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)
tenants = st.sampled_from(["", "a", "b", "c"])


class SchedulerTrace(RuleBasedStateMachine):
    """Requests come, run, are aborted and preempted in any order."""

    @initialize(
        num_pages=st.integers(8, 20),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 24),
        threshold=st.sampled_from([0, 0, 3]),
        caching=st.booleans(),
        policy=st.sampled_from(["fair", "fcfs", "priority"]),
        batch_policy=st.sampled_from(["mixed", "decode-first", "prefill-first"]),
        admission=st.sampled_from(["whole-prompt", "optimistic", "reserve"]),
        depth=st.sampled_from([1, 2, 4]),
        num_stages=st.sampled_from([1, 1, 2, 4]),
        drafts=st.sampled_from([0, 0, 4]),
        eos=st.frozensets(st.integers(0, 49), max_size=6),
        max_loras=st.integers(1, 3),
        lora_patience=st.integers(1, 6),
    )
    def start(self, num_pages: int, page_size: int, **overrides: object) -> None:
        self.begin(num_pages, page_size, **overrides)

    def begin(self, num_pages: int, page_size: int, **overrides: object) -> None:
        self.held: list[str] = []
        max_model_len = min(32, num_pages * page_size)
        settings = Settings(num_pages, page_size, max_model_len=max_model_len, **overrides)  # type: ignore[arg-type]
        settings.depth = max(settings.depth, settings.num_stages)
        self.harness = self.make_harness(settings)

    def make_harness(self, settings: Settings) -> Harness:
        return Harness(settings)

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 16),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "s"]),
        tenant=tenants,
        lower=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, priority: int, salt: str, tenant: str, lower: bool) -> None:
        self.harness.add(prompt, max_tokens, priority=priority, salt=salt, tenant=tenant, is_background=lower)

    @rule(prompt=prompts, max_tokens=st.integers(1, 16), adapter=st.integers(0, 5), tenant=tenants)
    def add_with_adapter(self, prompt: list[int], max_tokens: int, adapter: int, tenant: str) -> None:
        self.harness.add(prompt, max_tokens, tenant=tenant, adapter=adapter)

    @rule(prompt=prompts, max_tokens=st.integers(1, 16), salt=st.sampled_from(["", "s"]), tenant=tenants)
    def add_with_prompt_logprobs(self, prompt: list[int], max_tokens: int, salt: str, tenant: str) -> None:
        self.harness.add(prompt, max_tokens, salt=salt, tenant=tenant, prompt_logprobs=1)

    @rule(prompt=prompts, pooling=st.sampled_from(["mean", "last"]))
    def add_for_a_vector(self, prompt: list[int], pooling: str) -> None:
        self.harness.add(prompt, 1, pooling=pooling)

    @rule(prompt=prompts, size=st.integers(2, 4), max_tokens=st.integers(1, 8), tenant=tenants)
    def add_equal_prompts(self, prompt: list[int], size: int, max_tokens: int, tenant: str) -> None:
        for _ in range(size):
            self.harness.add(prompt, max_tokens, tenant=tenant)

    @rule()
    def abort_one_that_others_wait_for(self) -> None:
        waiting = [request for request in self.harness.scheduler.state.waiting if request.awaited_page is not None]
        for request in waiting[:1]:
            writer = self.harness.kv.writer_of(request.awaited_page, request)
            self.harness.abort(*[] if writer is None else [writer.id])

    @rule(prompt=prompts, max_tokens=st.integers(1, 8))
    def add_held(self, prompt: list[int], max_tokens: int) -> None:
        self.held.append(self.harness.add(prompt, max_tokens, status=RequestStatus.WAITING_FOR_GRAMMAR))

    @rule()
    def wake(self) -> None:
        if self.held:
            self.harness.engine.wake(self.held.pop(0))

    @rule(prompt=prompts, max_tokens=st.integers(1, 8))
    def open_session(self, prompt: list[int], max_tokens: int) -> None:
        self.harness.open_session(prompt, max_tokens)

    @rule(more=prompts, max_tokens=st.integers(1, 8), is_last=st.booleans())
    def extend_sessions(self, more: list[int], max_tokens: int, is_last: bool) -> None:
        for request_id in list(self.harness.sessions):
            self.harness.extend(request_id, more, max_tokens, is_last)

    @rule(ahead=st.integers(1, 5))
    def let_a_step_fail(self, ahead: int) -> None:
        self.harness.runner.failing_steps.add(self.harness.scheduler.step + ahead)

    @rule(preempt=st.booleans())
    def reset_cache(self, preempt: bool) -> None:
        self.harness.engine.reset_prefix_cache(preempt)
        self.harness.scheduler.check_invariants()

    @rule(back=st.integers(1, 6))
    def abort(self, back: int) -> None:
        number = len(self.harness.records) - back
        if number >= 0:
            self.harness.abort(str(number))

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            for request_id in self.held:
                self.harness.engine.wake(request_id)
            self.harness.drain()


TestSchedulerTrace = SchedulerTrace.TestCase
TestSchedulerTrace.settings = settings(
    # counted once: 39,754 steps in 350 examples; at least 20,000 are wanted
    max_examples=scaled(100),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
