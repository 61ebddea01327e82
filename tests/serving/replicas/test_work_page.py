"""Find a text worker's work when it died, and the request to blame."""

import random
from pathlib import Path

from tokenmill.core.part_messages import Verdict
from tokenmill.ipc.crash_attribution import RunningPage, page_path
from tokenmill.serving.replicas.trials import Trials
from tokenmill.serving.replicas.work_page import Work, WorkPage, work_at_death


def test_the_page_says_what_each_thread_is_at(tmp_path: Path) -> None:
    page = WorkPage(path := tmp_path / "page")
    assert work_at_death(path) == []
    page.write(2, "rendered", "b")
    page.write(0, "tokenized", "a" * 30)
    page.write(0, "prepared", "a")
    assert work_at_death(path) == [Work("prepared", "a"), Work("rendered", "b")]
    page.clear(0)
    assert work_at_death(path) == [Work("rendered", "b")]
    assert work_at_death(tmp_path / "none") == []


def test_a_torn_line_accuses_nobody(tmp_path: Path) -> None:
    page = WorkPage(path := tmp_path / "page")
    page.write(1, "rendered", "a")
    path.write_bytes(b"rend\xff" + path.read_bytes()[5:])
    assert work_at_death(path) == [Work("rendered", "a")]


def test_who_is_prepared_at_two_deaths_is_convicted_and_others_stay_suspects(tmp_path: Path) -> None:
    trials = Trials(tmp_path)
    page = WorkPage(page_path(tmp_path, "worker-0"))
    for line, one in enumerate("abc"):
        page.write(line, "rendered", one)
    assert trials.work_of("worker-0") == " while it rendered request a and rendered request b and rendered request c"
    assert trials.died("worker-0", "text worker 0", False) == Verdict(["a", "b", "c"])
    trials.clear(["a"])
    page = WorkPage(page_path(tmp_path, "worker-0-life-1"))
    page.write(0, "tokenized", "b")
    verdict = trials.died("worker-0-life-1", "text worker 0", False)
    assert verdict == Verdict(["c"], ["b"])
    assert verdict.said == "; request b is not tried again"
    assert trials.under_trial == ["text worker 0"]
    trials.clear(["c"])
    assert trials.under_trial == []


def test_a_text_worker_that_is_ended_with_all_that_it_has_accuses_nobody(tmp_path: Path) -> None:
    trials = Trials(tmp_path)
    WorkPage(page_path(tmp_path, "worker-0")).write(0, "rendered", "a")
    trials.died("worker-0", "text worker 0", False)
    WorkPage(page_path(tmp_path, "worker-0-life-1")).write(0, "rendered", "a")
    trials.forget_worker("worker-0-life-1", "text worker 0")
    assert trials.died("worker-0-life-1", "text worker 0", False) == Verdict()
    assert trials.under_trial == []


def test_suspects_of_engines_and_of_text_workers_are_told_apart(tmp_path: Path) -> None:
    trials = Trials(tmp_path)
    RunningPage(page_path(tmp_path, "engine-0")).write(["a"])
    WorkPage(page_path(tmp_path, "worker-0")).write(0, "rendered", "a")
    names = [("engine-0", "engine", True), ("worker-0", "text worker 0", False)]
    random.shuffle(names)
    assert [trials.died(*one) for one in names] == [Verdict(["a"]), Verdict(["a"])], "one death of each convicts nobody"
    trials.forget_engines()
    assert trials.under_trial == ["text worker 0"]
