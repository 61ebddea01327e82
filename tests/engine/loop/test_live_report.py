"""Compare what an engine shows with what it did, on random traces of requests that run short of everything."""

import pytest

from tests.engine.scheduler.harness import Harness
from tokenmill.core.live import ShowTurns
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop import live_report as live
from tokenmill.engine.loop.live_report import live_report


class Watcher:
    """Asks now and then, as the hub does."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.since = 0
        self.turns = []

    def ask(self, prefix=-1):
        asked = ShowTurns("x", self.since, True, True, prefix)
        engine = self.harness.engine
        report = live_report(asked, engine.iterations(), self.harness.scheduler, engine.lifetimes)
        self.turns += report.turns
        self.since = report.num_turns
        return report


def run_trace(rng, **settings):
    """A drained trace of forty requests, some aborted, and what a watcher saw of it."""
    harness = Harness(**settings)
    watcher = Watcher(harness)
    plans = []
    launch = harness.runner.launch
    harness.runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]
    aborted = set()
    for _ in range(40):
        prompt = rng.integers(0, 4, rng.integers(1, 20)).tolist()
        request_id = harness.add(prompt, int(rng.integers(1, 9)))
        for _ in range(rng.integers(0, 4)):
            harness.step()
        if rng.random() < 0.1 and harness.records[request_id].finish_reason is None:
            harness.abort(request_id)
            aborted.add(request_id)
        if rng.random() < 0.3:
            watcher.ask()
    harness.drain()
    while len(watcher.ask().turns):
        pass
    return harness, watcher, plans, aborted


@pytest.mark.parametrize(
    "settings", [{}, {"depth": 2}, {"drafts": 3, "depth": 2}, {"caching": False, "num_pages": 9}], ids=str
)
def test_turns_add_up_to_what_the_engine_did(rng, settings, monkeypatch):
    # A watcher that falls behind, and asks about requests that have ended.
    monkeypatch.setattr(live, "MOST_TURNS", int(rng.integers(1, 9)))
    harness, watcher, plans, aborted = run_trace(rng, **settings)
    turns = watcher.turns
    assert [turn.number for turn in turns] == list(range(1, len(turns) + 1)), "each turn comes once, in order"
    steps = {turn.step: turn for turn in turns if turn.step}
    assert set(steps) == {plan.step for plan in plans}
    for plan in plans:
        turn = steps[plan.step]
        drafts = 0 if plan.draft_ids is None else len(plan.draft_ids)
        assert turn.num_draft_tokens == drafts
        assert turn.num_decode_tokens + turn.num_prefill_tokens + drafts == plan.num_tokens
        assert turn.num_requests == len(plan.request_ids)
        assert {(one[0], one[1]) for one in turn.admitted} == {(new.request_id, new.row) for new in plan.new_rows}
    everybody = set(harness.records)
    assert sorted(id for turn in turns for id, _ in turn.arrived) == sorted(everybody)
    ended = {id: reason for turn in turns for id, reason in turn.ended}
    assert set(ended) == everybody
    assert {id for id, reason in ended.items() if reason == "abort"} == aborted
    assert sum(len(turn.preempted) for turn in turns) == harness.scheduler.state.num_preemptions
    admissions = [one[0] for turn in turns for one in turn.admitted]
    preempted = [id for turn in turns for id in turn.preempted]
    first = [id for turn in turns for id in turn.first]
    for id, record in harness.records.items():
        assert admissions.count(id) <= 1 + preempted.count(id)
        if record.tokens:
            assert id in first, "its first token is marked"


def test_requests_are_shown_with_their_rows_and_reasons(rng):
    harness = Harness(max_num_seqs=2)
    watcher = Watcher(harness)
    ids = [harness.add(rng.integers(0, 4, 5).tolist(), 8) for _ in range(4)]
    harness.step()
    harness.step()
    shown = watcher.ask().requests
    assert [(one.id, one.status, one.row) for one in shown[:2]] == [(ids[0], "running", 0), (ids[1], "running", 1)]
    assert all(one.status == "waiting" and one.row == -1 and one.wait_reason for one in shown[2:])
    assert [one.num_prompt_tokens for one in shown] == [5] * 4


def test_what_a_request_has_left_is_shown(rng):
    harness = Harness(max_num_seqs=1)
    watcher = Watcher(harness)
    for deadline in (0.0, 1e9):
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        harness.engine.add(AddRequest(id=str(deadline), prompt_token_ids=[1, 2], params=params, deadline=deadline))
    for _ in range(4):
        harness.engine.step()
    first, second = watcher.ask().requests
    assert first.num_output_tokens > 0 and first.num_left_tokens == 8 - first.num_output_tokens
    assert (second.row, second.num_left_tokens) == (-1, 8)
    assert (first.deadline, second.deadline) == (0.0, 1e9)


def test_the_tree_is_shown_by_sizes_and_its_tokens_when_they_are_asked_for(rng, monkeypatch):
    harness = Harness(num_pages=40)
    prompt = rng.integers(0, 4, 12).tolist()
    for tail in ([0, 1, 2, 3, 0], [3, 2, 1, 0, 3]):
        harness.add(prompt + tail, 2)
        harness.drain()
    watcher = Watcher(harness)
    report = watcher.ask()
    assert report.prefix == []
    tree = {node.number: node for node in report.tree}
    assert sum(node.num_tokens for node in tree.values()) == 12 + 4 + 4
    parents = {node.parent for node in tree.values()} - {-1}
    assert len(parents) == 1
    (shared,) = parents
    assert tree[shared].num_tokens == 12
    assert watcher.ask(shared).prefix == prompt
    assert watcher.ask(max(tree) + 1).prefix == []
    monkeypatch.setattr(live, "MOST_PREFIX_TOKENS", 5)
    assert watcher.ask(shared).prefix == prompt[:5]
    assert all(node.num_users == 0 and node.age >= 0 for node in tree.values())


def test_reports_are_bounded(rng, monkeypatch):
    monkeypatch.setattr(live, "MOST_REQUESTS", 3)
    monkeypatch.setattr(live, "MOST_NODES", 2)
    harness = Harness(num_pages=60, max_model_len=64)
    for number in range(8):
        harness.add([number % 4, number // 4] * 4, 2)
    watcher = Watcher(harness)
    assert (len(watcher.ask().requests), watcher.ask().num_requests) == (3, 8)
    harness.drain()
    assert len(harness.kv.cache.nodes()) > 2
    monkeypatch.setattr(live, "MOST_TURNS", 5)
    report = watcher.ask()
    assert len(report.turns) == 5
    assert len(report.tree) == 2


@pytest.mark.slow
def test_what_is_kept_of_iterations_is_bounded():
    harness = Harness(num_pages=60, max_model_len=64)
    for _ in range(1200):
        harness.add([1], 1)
        harness.drain()
    assert len(harness.engine.iterations()) == 1000


def test_who_asks_gets_what_is_behind_the_turn_that_it_knows():
    harness = Harness()
    harness.add([1, 2, 3], 4)
    harness.drain()
    kept = [turn.number for turn in harness.engine.iterations()]
    for since in (0, kept[0], kept[-1], 10**6):
        watcher = Watcher(harness)
        watcher.since = since
        assert [turn.number for turn in watcher.ask().turns] == [number for number in kept if number > since]


def test_what_ends_while_nothing_runs_is_shown_at_once():
    harness = Harness()
    watcher = Watcher(harness)
    request_id = harness.add([1, 2, 3], 4)
    harness.abort(request_id)
    (turn,) = watcher.ask().turns
    assert (turn.arrived, turn.ended, turn.step) == ([(request_id, 3)], [(request_id, "abort")], 0)
    assert watcher.ask().turns == []


def lanes(turns, owners=()):
    """Return who had a row from when to when, as a page makes it of turns and of owners before them."""
    found = {(one.id, one.row, one.since): None for one in owners}
    open_ = {one.id: (one.id, one.row, one.since) for one in owners}
    for turn in turns:
        for id in turn.preempted:
            found[open_.pop(id)] = turn.at
        for id, row, *_ in turn.admitted:
            open_[id] = (id, row, turn.at)
            found[open_[id]] = None
        for id, _ in turn.ended:
            if id in open_:
                found[open_.pop(id)] = turn.at
    return found


@pytest.mark.parametrize("settings", [{}, {"depth": 2}, {"caching": False, "num_pages": 9}], ids=str)
def test_who_comes_later_sees_the_lanes_that_were_there_from_the_start(rng, settings):
    harness, early, *_ = run_trace(rng, **settings)
    for _ in range(3):
        harness.add(rng.integers(0, 4, 5).tolist(), 9)
    harness.step()
    harness.step()
    early.ask()
    kept = harness.engine.iterations()
    for first in rng.integers(0, len(kept), 8):
        asked = ShowTurns("x", 0, True, False)
        report = live_report(asked, kept[first:][: live.MOST_TURNS], harness.scheduler, harness.engine.lifetimes)
        assert report.kept_since == kept[first].news.at
        seen = lanes(report.turns, report.owners)
        until = report.turns[-1].number
        whole = lanes([turn for turn in early.turns if turn.number <= until])
        still = {lane: end for lane, end in whole.items() if end is None or end >= report.kept_since}
        assert {lane: seen.get(lane, "lost") for lane in still} == still
        assert all(lane in whole for lane in seen)
    firsts = {id: turn.at for turn in early.turns for id in turn.first}
    for request in report.requests:
        arrived = next(turn.at for turn in early.turns if request.id in dict(turn.arrived))
        assert request.arrived_at == arrived
        assert request.first_at >= firsts.get(request.id, 0.0)
        assert (request.row_at > 0) == (request.row >= 0)
