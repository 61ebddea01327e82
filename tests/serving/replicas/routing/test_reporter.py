"""The reports on an engine to text workers, and their times."""

from tokenmill.core.messages import AddRequest
from tokenmill.core.part_messages import EngineReport, LeaveWorker, WatchEngine
from tokenmill.core.request import Request
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.replicas.routing.reporter import REPORT_INTERVAL, Reporter


class Watched:
    """A reporter whose reports are collected."""

    def __init__(self, *workers: str):
        self.sent: list[tuple[str, EngineReport]] = []
        self.reporter = Reporter(lambda *sent: self.sent.append(sent), lambda: [7, 8])
        for worker in workers:
            self.reporter.heed(WatchEngine(worker))
        self.requests: dict[str, Request] = {}

    def add(self, name: str, worker: str, num_tokens: int, num_missing: int) -> None:
        params = SamplingParams()
        message = AddRequest(
            id=name, prompt_token_ids=[1] * num_tokens, params=params, worker=worker, num_missing_tokens=num_missing
        )
        self.reporter.heed(message)
        self.requests[name] = Request(
            name, [1] * num_tokens, params, arrival=0, max_tokens_total=1000, stop_token_ids=frozenset()
        )

    def report(self, now: float, changes=()) -> list[tuple[str, EngineReport]]:
        self.sent.clear()
        self.reporter.report(list(changes), self.requests, now)
        return list(self.sent)


def test_who_watches_hears_first_what_is_cached():
    one = Watched("worker-0")
    assert one.sent == [("worker-0", EngineReport(changes=[(True, [7, 8])], is_first=True))]


def test_nobody_is_told_who_did_not_ask():
    nobody = Watched()
    nobody.add("a", "worker-0", 10, 10)
    assert nobody.report(1.0, [(True, [1])]) == []


def test_changes_are_told_at_once_and_the_load_once_in_a_while():
    one = Watched("worker-0")
    assert one.report(5.0) == [], "an idle engine has nothing to say"
    one.add("a", "worker-0", 10, 10)
    assert [report.num_queued_tokens for _, report in one.report(5.0)] == [10]
    assert one.report(5.0 + REPORT_INTERVAL / 2) == []
    assert [report.changes for _, report in one.report(5.0 + REPORT_INTERVAL / 2, [(True, [1])])] == [[(True, [1])]]
    one.requests.clear()
    assert [report.num_queued_tokens for _, report in one.report(6.0)] == [0], "that it is idle again"
    assert one.report(7.0) == []


def test_the_load_is_what_is_left_to_compute():
    one = Watched("worker-0")
    one.add("waits", "worker-0", 100, 30)
    one.add("runs", "worker-0", 100, 30)
    one.add("unknown", "elsewhere", 100, 30)
    one.requests["runs"].num_computed_tokens = 80
    assert [report.num_queued_tokens for _, report in one.report(1.0)] == [30 + 20 + 100]


def test_each_text_worker_is_told_of_its_own_requests_and_of_the_others():
    two = Watched("worker-0", "worker-1")
    for number in range(3):
        two.add(str(number), "worker-1", 10, 10)
    two.add("mine", "worker-0", 10, 10)
    del two.requests["0"]
    told = {worker: (report.num_taken, report.num_others) for worker, report in two.report(1.0)}
    assert told == {"worker-0": (1, 2), "worker-1": (3, 1)}
    two.reporter.heed(LeaveWorker("worker-1"))
    assert [worker for worker, _ in two.report(2.0)] == ["worker-0"]
