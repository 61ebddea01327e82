"""Policies that are not ours: found by entry point or `module:name`, and no invariant depends on what they do."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.engine.scheduler.harness import Harness, plans
from tokenmill import LLM, SamplingParams
from tokenmill.cli.main import main
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.request import FinishReason, Request
from tokenmill.engine.scheduler.policies import AdmissionPolicy, BatchPolicy, QueuePolicy, Step, View
from tokenmill.lab.simulate.replay import replay

HERE = "tests.engine.scheduler.test_own_policies"
EXAMPLES = Path(__file__).parents[3] / "examples"


class LastFirst(QueuePolicy):
    """Newest first; whoever has waited for a multiple of ten steps comes before all others from then on."""

    def __init__(self) -> None:
        self.aged: set[str] = set()

    def rank(self, request: Request) -> tuple[bool, int]:
        return request.id not in self.aged, -request.arrival

    def changed(self, view: View, step: int) -> Iterable[Request]:
        newly = [request for request in view.waiting if step % 10 == 0 and request.id not in self.aged]
        self.aged |= {request.id for request in newly}
        return newly

    def choose_victim(self, candidates: Sequence[Request]) -> Request:
        return min(candidates, key=lambda request: (-request.num_tokens, request.arrival))


class HalfEmpty(AdmissionPolicy):
    """Whole prompts, but nobody begins while others run and less than half of the pages can be taken."""

    def num_tokens_to_hold(self, request: Request, end: int, view: View) -> int:
        return request.num_tokens

    def reason_to_wait(self, request: Request, view: View) -> str:
        is_full = 2 * view.num_available_pages < view.num_pages
        return "waits for half of the pages" if view.running and is_full else ""


class OneByOne(BatchPolicy):
    """One new request a step, short prompts only as long as there are any."""

    def fill(self, step: Step) -> None:
        if step.advance() or step.is_empty:
            step.admit(lambda request: request.num_prompt_tokens < 8, limit=1)
            if step.is_empty:
                step.admit(limit=1)


class NoPolicy:
    """Of no kind."""


AN_INSTANCE = LastFirst()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "overrides",
    [
        {"policy": f"{HERE}:LastFirst"},
        {"admission": f"{HERE}:HalfEmpty"},
        {"batch_policy": f"{HERE}:OneByOne"},
        {"policy": f"{HERE}:LastFirst", "admission": f"{HERE}:HalfEmpty", "batch_policy": f"{HERE}:OneByOne"},
    ],
)
def test_whatever_a_policy_does_every_answer_is_right(depth: int, overrides: dict[str, str], tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    harness = Harness(depth=depth, num_pages=10, budget=12, log=tmp_path / "log", **overrides)
    for _ in range(20):
        harness.add([rng.randrange(3) for _ in range(rng.randint(1, 18))], rng.randint(1, 10))
        for _ in range(rng.randint(0, 4)):
            harness.step()
    # Victims of its own choice may be preempted more often than ours.
    while harness.engine.has_work and len(harness.runner.plans) < 5000:
        harness.step()
    assert not harness.engine.has_work
    harness.check_outputs()
    harness.engine.close()
    outcome = replay(tmp_path / "log")
    assert outcome.difference is None
    assert outcome.num_plans == len(harness.runner.plans)


def test_the_order_of_a_policy_is_the_order_of_steps() -> None:
    harness = Harness(policy=f"{HERE}:LastFirst", max_num_seqs=1)
    for start in range(3):
        harness.add([start], 2)
    harness.drain()
    first_steps = {next(iter(plan)): number for number, plan in reversed([*enumerate(plans(harness))])}
    assert sorted(first_steps, key=first_steps.__getitem__) == ["2", "1", "0"]


def test_a_policy_that_lets_nobody_in_yet_says_why() -> None:
    harness = Harness(admission=f"{HERE}:HalfEmpty", num_pages=12)
    first, second = harness.add([1] * 28, 4), harness.add([2] * 4, 2)
    harness.step()
    harness.step()
    assert harness.scheduler.explain(second) == "waits for half of the pages"
    harness.drain()
    assert {harness.records[name].finish_reason for name in (first, second)} == {FinishReason.LENGTH}


def test_at_most_so_many_enter_a_step() -> None:
    harness = Harness(batch_policy=f"{HERE}:OneByOne")
    for prompt in ([1] * 9, [2] * 3, [3] * 3):
        harness.add(prompt, 3)
    harness.drain()
    entered = [[row.request_id for row in plan.new_rows] for plan in harness.runner.plans]
    assert [ids for ids in entered if ids] == [["1"], ["2"], ["0"]]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no.such.module:Policy", "cannot be imported"),
        (f"{HERE}:NoSuchName", "cannot be imported"),
        (f"{HERE}:NoPolicy", "is not a QueuePolicy"),
        (f"{HERE}:HalfEmpty", "is not a QueuePolicy"),
        ("fiar", "must be one of fair, fcfs, priority, an entry point of tokenmill.policies or module:name"),
    ],
)
def test_what_is_no_policy_is_refused_with_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        Harness(policy=name)


def test_an_instance_will_do() -> None:
    harness = Harness(policy=f"{HERE}:AN_INSTANCE")
    harness.add([1, 2], 3)
    harness.drain()


def test_a_policy_is_found_by_the_name_of_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "shortest-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shortest\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tokenmill.policies]\nshortest = shortest_first:ShortestFirst\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    harness = Harness(policy="shortest", max_num_seqs=1, num_pages=40, max_model_len=150, budget=200)
    for length in (130, 70, 5):
        harness.add([length] * length, 2)
    harness.drain()
    assert [row.request_id for plan in harness.runner.plans for row in plan.new_rows] == ["2", "1", "0"]


def test_the_command_line_refuses_what_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--scheduling-policy", "fiar"])
    assert end.value.code == 2
    assert "'fiar' is not one of fair, fcfs, priority or module:name; did you mean fair?" in capsys.readouterr().err


def test_the_offline_class_takes_it_and_its_log_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    log = tmp_path / "log"
    llm = LLM(scheduling_policy="shortest_first:ShortestFirst", max_num_seqs=1, step_log=str(log))
    llm.generate(["Tell me a long story of a mill. " * 12, "Hi"], SamplingParams(max_tokens=2))
    llm.close()
    assert main(["replay", str(log)]) == 0
    assert "all identical" in capsys.readouterr().out
