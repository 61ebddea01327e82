"""Reports on prompts: throttled, only for those that ask, and gone with their request."""

from types import SimpleNamespace

from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.startup.assembly.prompt_progress import INTERVAL, ProgressReports


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def asked(request_id="a", wants_progress=True):
    return AddRequest(id=request_id, prompt_token_ids=[1] * 100, params=SamplingParams(), wants_progress=wants_progress)


def running(request_id="a", num_computed=0, num_outputs=0, row=0):
    return SimpleNamespace(
        id=request_id, row=row, num_computed_tokens=num_computed, num_prompt_tokens=100, num_cached_tokens=20,
        num_output_tokens=num_outputs,
    )  # fmt: skip


def host(*requests):
    return SimpleNamespace(requests={one.id: one for one in requests})


def test_a_prompt_is_told_of_a_few_times_a_second_until_its_first_token():
    clock = Clock()
    reports = ProgressReports(clock)
    reports.arrived(asked())
    assert list(reports.poll(host(running(row=None)))) == [], "it waits"
    (first,) = reports.poll(host(running(num_computed=20)))
    assert (first.token_ids, first.finish_reason) == ([], None)
    assert (first.progress.num_tokens, first.progress.num_cached_tokens, first.progress.num_computed_tokens) == (
        100, 20, 20,
    )  # fmt: skip
    assert first.progress.seconds_left is None
    clock.now += INTERVAL / 2
    assert list(reports.poll(host(running(num_computed=30)))) == []
    clock.now += INTERVAL / 2
    (second,) = reports.poll(host(running(num_computed=60)))
    assert second.progress.seconds_left == INTERVAL
    clock.now += INTERVAL
    assert list(reports.poll(host(running(num_computed=100, num_outputs=1)))) == []
    clock.now += INTERVAL
    assert list(reports.poll(host(running(num_computed=40)))) == [], "it has had a token: never again"


def test_a_preempted_prompt_begins_again():
    clock = Clock()
    reports = ProgressReports(clock)
    reports.arrived(asked())
    for num_computed, left in ((20, None), (60, INTERVAL), (10, 2.25 * INTERVAL), (20, 8 * INTERVAL)):
        (report,) = reports.poll(host(running(num_computed=num_computed)))
        assert report.progress.seconds_left == left
        clock.now += INTERVAL


def test_the_next_prompt_is_taken_to_go_on_at_the_same_pace():
    clock = Clock()
    reports = ProgressReports(clock)
    reports.arrived(asked())
    for num_computed in (0, 50):
        reports.poll(host(running(num_computed=num_computed)))
        clock.now += INTERVAL
    reports.arrived(asked("b"))
    (report,) = reports.poll(host(running("b")))
    assert report.progress.seconds_left == 2 * INTERVAL


def test_who_does_not_ask_or_has_ended_is_not_told_of():
    reports = ProgressReports(Clock())
    reports.arrived(asked(wants_progress=False))
    assert not reports.poll(host(running()))
    reports.arrived(asked("b"))
    reports.released(["b"], {})
    assert not reports.poll(host(running("b")))
