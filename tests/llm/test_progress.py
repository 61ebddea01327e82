"""Progress of offline calls: rich's bars on a terminal, a plain line in notebooks that have no widgets."""

import sys
import warnings

import pytest
import rich.console

from tokenmill.llm.progress import BarProgress, LineProgress, open_progress


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setattr("tokenmill.llm.progress.find_spec", lambda name: None)


@pytest.mark.usefixtures("notebook")
def test_a_notebook_without_widgets_gets_one_line_and_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_progress(3, True) as progress:
            progress.update(1, 5)
            progress.update(3, 7)
    written = capsys.readouterr().err
    assert written.count("\n") == 1
    assert "\033" not in written
    assert written.rsplit("\r", 1)[-1].startswith("generating 3/3, 12 tokens")


@pytest.mark.usefixtures("notebook")
def test_nothing_is_shown_where_nothing_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_progress(3, False) as progress:
            progress.update(3, 7)
    assert capsys.readouterr() == ("", "")


def test_a_line_is_written_four_times_a_second_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    line = LineProgress(100, lambda: now)
    with line:
        for number in range(100):
            now += 0.0625
            line.update(number, 1)
    assert capsys.readouterr().err.count("\r") == 2 + 100 // 4


def test_elsewhere_rich_draws() -> None:
    assert isinstance(open_progress(1, True), BarProgress)
