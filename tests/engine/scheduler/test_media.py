"""Images in the schedule: budgets, room, order, and random traces with every invariant after every step."""

from __future__ import annotations

from functools import partial

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.engine.scheduler.harness import Harness, Settings, plans
from tests.tiers import scaled
from tokenmill.core.media import MediaInput, MediaSpan
from tokenmill.core.request import FinishReason, Request, RequestStatus
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.transfers import Encoded
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.resources.encoder_cache import EncoderCache

PAD = 49


def span(offset: int, length: int, digest: str) -> MediaInput:
    return MediaInput(MediaSpan(offset, length, digest, 2, 2 * length, PAD), b"")


def prompt_of(parts: list[int | tuple[str, int]]) -> tuple[list[int], list[MediaInput]]:
    """A prompt of tokens and (content, length), and its images."""
    prompt: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            prompt.append(part)
        else:
            media.append(span(len(prompt), part[1], part[0]))
            prompt += [PAD] * part[1]
    return prompt, media


def add(harness: Harness, *parts: int | tuple[str, int], max_tokens: int = 2) -> str:
    prompt, media = prompt_of(list(parts))
    return harness.add(prompt, max_tokens, media=media)


def encodes(harness: Harness) -> list[tuple[str, ...]]:
    return [plan.encode for plan in harness.runner.plans if plan.encode]


def test_a_chunk_is_cut_before_an_image_that_the_budget_has_no_room_for() -> None:
    harness = Harness(encoder_budget=6, encoder_cache_tokens=20)
    add(harness, 1, ("a", 4), 2, ("b", 4), 3)
    harness.step()
    assert plans(harness) == [{"0": 6}]
    assert encodes(harness) == [("a",)]
    harness.drain()
    assert encodes(harness) == [("a",), ("b",)]


def test_an_image_is_encoded_whole_though_its_placeholders_are_cut() -> None:
    harness = Harness(budget=5, encoder_budget=8, encoder_cache_tokens=8)
    add(harness, 1, ("a", 8), 2)
    harness.drain()
    assert [plan["0"] for plan in plans(harness)][:2] == [5, 5]
    assert encodes(harness) == [("a",)]


def test_an_image_that_is_not_to_be_cut_waits_for_a_step_with_room() -> None:
    harness = Harness(budget=5, encoder_budget=8, encoder_cache_tokens=8, whole_images=True)
    add(harness, 1, 1, ("a", 4), 2)
    harness.drain()
    assert [plan["0"] for plan in plans(harness)][:2] == [2, 5]


def test_the_rest_of_an_image_whose_beginning_is_cached_is_not_cut_either() -> None:
    config = SchedulerConfig(4, 8, encoder_budget=8, encoder_cache_tokens=8, disable_chunked_mm_input=True)
    prompt, media = prompt_of([1, 1, ("a", 6), 2])
    request = Request(
        "0", prompt, SamplingParams(), arrival=0, max_tokens_total=20, media=tuple(one.span for one in media)
    )
    limit = partial(EncoderCache(config).limit, request)
    assert limit(0, 9) == (9, "")
    assert limit(0, 7)[0] == 2
    assert limit(2, 5)[0] == limit(4, 3)[0] == 0
    assert limit(4, 4) == (4, "")


def test_equal_images_are_encoded_once_and_others_are_not_taken_for_them() -> None:
    harness = Harness(encoder_budget=20, encoder_cache_tokens=20, page_size=2)
    add(harness, 1, ("a", 4), 2)
    harness.drain()
    same, other = add(harness, 1, ("a", 4), 3), add(harness, 1, ("b", 4), 2)
    harness.drain()
    assert encodes(harness) == [("a",), ("b",)]
    assert harness.records[same].num_cached_tokens == 4
    assert harness.records[other].num_cached_tokens == 0


def test_the_image_not_used_for_longest_is_forgotten_first() -> None:
    harness = Harness(encoder_budget=8, encoder_cache_tokens=8, caching=False)
    for content in ("a", "b", "a", "c"):
        add(harness, 1, (content, 4), 2)
        harness.drain()
    assert [plan.forget for plan in harness.runner.plans if plan.forget] == [("b",)]


def test_who_waits_for_the_encoder_is_told_so() -> None:
    harness = Harness(encoder_budget=4, encoder_cache_tokens=20)
    add(harness, 1, ("a", 4), 2)
    waiting = add(harness, ("b", 4), 2)
    harness.step()
    assert harness.scheduler.requests[waiting].wait_reason == (
        "needs the encoder for 4 tokens, 0 of 4 are left in the step"
    )
    harness.drain()


def test_an_image_that_can_never_be_encoded_is_refused_at_the_door() -> None:
    for limits in ({"encoder_budget": 3, "encoder_cache_tokens": 9}, {"encoder_budget": 9, "encoder_cache_tokens": 3}):
        harness = Harness(**limits)
        refused = add(harness, 1, ("a", 4), 2)
        assert harness.records[refused].finish_reason is FinishReason.ERROR
        assert not harness.scheduler.requests


def test_an_output_from_outside_takes_room_but_no_budget() -> None:
    harness = Harness(encoder_budget=4, encoder_cache_tokens=9)
    harness.engine.apply_transfer_events([Encoded("a"), Encoded("b")])
    add(harness, 1, ("a", 4), 2)
    add(harness, ("b", 4), 2, ("c", 3), 3)
    harness.step()
    assert plans(harness) == [{"0": 6, "1": 5}]
    (plan,) = harness.runner.plans
    assert (plan.encode, plan.load) == ((), ("a", "b"))
    assert harness.scheduler.requests["1"].wait_reason == ""
    harness.drain()
    assert encodes(harness) == [("c",)]
    counts = harness.scheduler.counts()
    assert (counts["encoder_tokens"], counts["encoder_loaded_tokens"]) == (3, 8)


def test_an_output_that_is_not_outside_any_more_is_encoded_when_it_is_needed_again() -> None:
    harness = Harness(encoder_budget=4, encoder_cache_tokens=4, caching=False)
    harness.engine.apply_transfer_events([Encoded("a")])
    for content in ("a", "b", "a"):
        add(harness, 1, (content, 4), 2)
        harness.drain()
    harness.engine.apply_transfer_events([Encoded("a", is_there=False, has_failed=True)])
    for content in ("b", "a"):
        add(harness, 1, (content, 4), 2)
        harness.drain()
    assert [plan.load for plan in harness.runner.plans if plan.load] == [("a",), ("a",)]
    assert encodes(harness) == [("b",), ("b",), ("a",)]
    assert harness.scheduler.counts()["encoder_failed_loads"] == 1


def test_others_run_while_a_request_waits_for_the_encoder() -> None:
    harness = Harness(encoder_budget=4, encoder_cache_tokens=4)
    prompt, media = prompt_of([1, ("a", 4), 2])
    waiting = harness.add(prompt, 2, media=media, status=RequestStatus.WAITING_FOR_ENCODER)
    other = add(harness, ("b", 4), 3)
    harness.step()
    assert plans(harness) == [{other: 5}]
    assert harness.scheduler.requests[waiting].wait_reason == "is waiting for encoder"
    assert harness.scheduler.counts()["waiting_by_reason"]["encoder"] == 1
    harness.engine.wake(waiting)
    harness.drain()
    assert harness.records[waiting].finish_reason is FinishReason.LENGTH


def test_a_model_without_a_tower_has_no_room_for_any() -> None:
    harness = Harness()
    assert harness.records[add(harness, 1, ("a", 1), 2)].finish_reason is FinishReason.ERROR


contents = st.tuples(st.sampled_from("abcde"), st.integers(1, 6))


class MediaTrace(RuleBasedStateMachine):
    """Requests with images come, run, are aborted and preempted in any order."""

    @initialize(
        num_pages=st.integers(8, 20),
        page_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(6, 16),
        caching=st.booleans(),
        policy=st.sampled_from(["fair", "fcfs", "priority"]),
        batch_policy=st.sampled_from(["mixed", "decode-first", "prefill-first"]),
        admission=st.sampled_from(["whole-prompt", "optimistic", "reserve"]),
        depth=st.sampled_from([1, 2, 4]),
        encoder_budget=st.integers(4, 12),
        encoder_cache_tokens=st.integers(4, 16),
        whole_images=st.booleans(),
    )
    def start(self, num_pages: int, page_size: int, **overrides: object) -> None:
        model_len = min(32, num_pages * page_size)
        self.harness = Harness(Settings(num_pages, page_size, max_model_len=model_len, **overrides))  # type: ignore[arg-type]

    @rule(
        parts=st.lists(st.one_of(st.integers(0, 2), contents), min_size=1, max_size=6),
        max_tokens=st.integers(1, 8),
        priority=st.integers(-1, 1),
    )
    def add(self, parts: list[int | tuple[str, int]], max_tokens: int, priority: int) -> None:
        # A content has one length.
        lengths = [part if isinstance(part, int) else (f"{part[0]}{part[1]}", part[1]) for part in parts]
        prompt, media = prompt_of([*lengths, 1])
        self.harness.add(prompt, max_tokens, media=media, priority=priority)

    @rule(index=st.integers(0, 100))
    def abort(self, index: int) -> None:
        ids = list(self.harness.scheduler.requests)
        if ids:
            self.harness.abort(ids[index % len(ids)])

    @rule(content=contents, is_there=st.booleans())
    def hear(self, content: tuple[str, int], is_there: bool) -> None:
        """An output can be loaded from outside, or not any more."""
        self.harness.engine.apply_transfer_events([Encoded(f"{content[0]}{content[1]}", is_there)])

    @rule()
    def step(self) -> None:
        self.harness.step()

    @rule(num_steps=st.integers(1, 8))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.harness.step()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


TestMediaTrace = MediaTrace.TestCase
TestMediaTrace.settings = settings(
    max_examples=scaled(30), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
