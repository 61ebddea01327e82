"""Requests of a model that keeps no KV: whole in a step, without pages, in turn, and none waits for ever."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import TokenOutput
from tokenmill.core.plan import RowFailure, StepPlan, StepResult
from tokenmill.core.pooling import PoolingParams
from tokenmill.core.request import FinishReason, Request
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.step_log import LogHeader
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.schedule_pass import MOST_PASSED_OVER

LONGEST = 20


class Texts:
    """A scheduler over texts of which only the lengths matter; a vector is the length of its text.

    Attributes:
        steps: ids and lengths of the texts of each step, in batch order.
        ended: step in which each text got its outcome, counted from 1.
    """

    def __init__(self, budget: int = LONGEST, max_num_seqs: int = 8, depth: int = 1, policy: str = "fair") -> None:
        config = SchedulerConfig(max_num_seqs, budget, enable_chunked_prefill=False, policy=policy)
        header = LogHeader(
            scheduler=config,
            num_pages=0,
            page_size=4,
            enable_prefix_caching=False,
            max_model_len=LONGEST,
            vocab_size=50,
            eos_token_ids=[],
            depth=depth,
            keeps_kv=False,
        )
        self.scheduler = header.make_scheduler()
        self._depth = depth
        self._results: list[StepResult] = []
        self._count = 0
        self.failing: set[str] = set()
        self.steps: list[list[tuple[str, int]]] = []
        self.ended: dict[str, int] = {}

    def add(self, length: int, tenant: str = "", is_background: bool = False) -> str:
        """Queue a text; its id is its number."""
        request = Request(
            str(self._count),
            [1] * length,
            SamplingParams(max_tokens=1, ignore_eos=True),
            arrival=self._count,
            max_tokens_total=length + 1,
            tenant=tenant,
            pooling=PoolingParams(),
            is_background=is_background,
        )
        self._count += 1
        self.scheduler.add(request)
        return request.id

    def step(self) -> list[TokenOutput]:
        """Schedule and launch a step, and commit the oldest one when it is due."""
        plan = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if plan is not None:
            self._results.append(self._run(plan))
        if not self._results or (plan is not None and len(self._results) < self._depth):
            return []
        outputs = self.scheduler.commit(self._results.pop(0))
        self.scheduler.check_invariants()
        for output in outputs:
            assert output.id not in self.ended, "a second outcome"
            self.ended[output.id] = len(self.steps)
        return outputs

    def drain(self) -> None:
        """Run all that is queued."""
        while self.scheduler.has_work:
            before = len(self.steps)
            self.step()
            assert len(self.steps) > before or not self.scheduler.is_stuck

    def _run(self, plan: StepPlan) -> StepResult:
        lengths = {new.request_id: new.num_prompt_tokens for new in plan.new_rows}
        assert list(lengths) == list(plan.request_ids), "a text takes its row in its only step"
        assert plan.num_scheduled.tolist() == list(lengths.values()), "it is whole"
        assert not plan.num_computed.any() and not plan.num_samples.any() and not len(plan.page_ids)
        self.steps.append(list(lengths.items()))
        vectors = {i: length.to_bytes(4, "little") for i, length in enumerate(lengths.values())}
        failures = {i: RowFailure("no numbers") for i, own in enumerate(lengths) if own in self.failing}
        empty = np.zeros(0, np.int32), np.zeros(len(lengths) + 1, np.int32)
        kept = {i: vector for i, vector in vectors.items() if i not in failures}
        return StepResult(plan.step, *empty, failures=failures, embeddings=kept)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_every_text_is_whole_in_one_step_and_gets_its_vector(policy: str, depth: int) -> None:
    rng = random.Random(f"{policy} {depth}")
    texts, left, outputs = Texts(depth=depth, policy=policy), 300, []
    while left or texts.scheduler.has_work:
        for _ in range(min(left, rng.randint(0, 6))):
            texts.add(rng.randint(1, LONGEST), rng.choice("abc"))
            left -= 1
        outputs += texts.step()
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH} and len(outputs) == 300
    lengths = {own: length for step in texts.steps for own, length in step}
    assert {output.id: int.from_bytes(output.embedding or b"", "little") for output in outputs} == lengths
    assert all(sum(length for _, length in step) <= LONGEST and len(step) <= 8 for step in texts.steps)
    assert not texts.scheduler.state.num_preemptions and not texts.scheduler.requests


def test_shorter_ones_fill_the_rest_of_a_step_and_the_one_passed_over_opens_the_next() -> None:
    texts = Texts()
    for length in (11, 12, 13, 6, 4, 3):
        texts.add(length)
    texts.drain()
    assert [[length for _, length in step] for step in texts.steps] == [[11, 6, 3], [12, 4], [13]]


def test_a_long_text_does_not_starve_behind_short_ones_that_keep_coming() -> None:
    texts = Texts()
    for _ in range(4):
        texts.add(6, "short")
    long = texts.add(LONGEST, "long")
    for _ in range(12):
        for _ in range(4):
            texts.add(6, "short")
        texts.step()
    assert texts.ended[long] <= 4


def test_a_tenant_with_one_text_does_not_wait_for_all_of_another_s() -> None:
    texts = Texts()
    for _ in range(200):
        texts.add(5, "many")
    texts.step()
    texts.step()
    one = texts.add(19, "one")
    for _ in range(6):
        texts.step()
    assert texts.ended[one] <= 6


def test_texts_of_a_later_class_do_not_fill_a_step() -> None:
    texts = Texts()
    texts.add(15)
    texts.add(6)
    texts.add(5, is_background=True)
    texts.drain()
    assert [[length for _, length in step] for step in texts.steps] == [[15], [6, 5]]


def test_so_many_are_passed_over_and_no_more() -> None:
    texts = Texts()
    for length in (15, *[6] * (MOST_PASSED_OVER + 1), 5):
        texts.add(length)
    texts.step()
    assert [length for _, length in texts.steps[0]] == [15]


def test_a_text_that_no_step_has_room_for_is_refused() -> None:
    texts = Texts(budget=10)
    texts.add(10)
    with pytest.raises(InvalidRequest, match="11 in a step without chunks; 10 fit"):
        texts.add(11)
    texts.drain()
    assert texts.ended == {"0": 1}


def test_a_text_without_numbers_fails_alone() -> None:
    texts = Texts()
    broken = texts.add(4)
    sound = texts.add(5)
    texts.failing = {broken}
    outputs = {output.id: output for output in texts.step()}
    assert outputs[broken].finish_reason is FinishReason.ERROR and outputs[broken].embedding is None
    assert outputs[sound].finish_reason is FinishReason.LENGTH


def test_an_aborted_text_gets_no_vector() -> None:
    texts = Texts(depth=2)
    first = texts.add(4)
    texts.step()
    assert [output.finish_reason for output in texts.scheduler.abort([first])] == [FinishReason.ABORT]
    texts.drain()
    assert first not in texts.ended and not texts.scheduler.requests
