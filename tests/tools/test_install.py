"""Check what `make` installs: which torch is taken from where, and what is shown while kernels compile."""

import io
import sys

import pytest
from tools.install_torch import CPU_INDEX, choose_index

from tests.house.source_tree import ROOT
from tools import install_native, install_torch

NOTHING_SET = "global.timeout='60'\n:env:.disable-pip-version-check='1'\n"


@pytest.mark.parametrize(
    ("wanted", "system", "gpu", "settings", "index"),
    [
        ("", "linux", False, NOTHING_SET, CPU_INDEX),
        ("", "linux", True, NOTHING_SET, ""),
        ("", "darwin", False, NOTHING_SET, ""),
        ("", "linux", False, NOTHING_SET + "global.index-url='https://mirror.example/simple'\n", ""),
        ("", "linux", False, ":env:.find-links='/wheels'\n", ""),
        ("", "linux", False, "site.no-index='1'\n", ""),
        ("cpu", "linux", True, ":env:.find-links='/wheels'\n", CPU_INDEX),
        ("default", "linux", False, NOTHING_SET, ""),
        ("https://mirror.example/cpu", "linux", True, NOTHING_SET, "https://mirror.example/cpu"),
    ],
)
def test_torch_comes_from_where_the_user_or_the_machine_says(wanted, system, gpu, settings, index):
    assert choose_index(wanted, system, gpu, settings) == (index, not wanted)


def installed(monkeypatch, codes, *arguments):
    """Return pip's arguments for these arguments of the script, if its calls end with these codes."""
    calls = []

    def install(words):
        calls.append(words)
        return codes[len(calls) - 1]

    monkeypatch.setattr(install_torch, "install", install)
    monkeypatch.setattr(install_torch, "pip_settings", lambda: NOTHING_SET)
    monkeypatch.setattr(install_torch, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "argv", ["install_torch.py", *arguments, str(ROOT / "requirements" / "torch.txt")])
    return install_torch.main(), calls


def test_an_index_that_does_not_answer_is_done_without_unless_it_was_asked_for(monkeypatch):
    code, calls = installed(monkeypatch, [1, 0])
    assert code == 0
    assert [CPU_INDEX in call for call in calls] == [True, False]
    assert all(call[-1] == "torch==2.13.0" for call in calls)
    code, calls = installed(monkeypatch, [1], "--torch", "cpu")
    assert code == 1
    assert len(calls) == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


SAID = ["Using pip\n", "  [1/3] Building CXX object a.o\n", "  note\n", "  [2/3] Building b.o\n", "  [3/3] Linking\n"]


@pytest.mark.parametrize(
    ("stream", "counts"), [(io.StringIO(), ["3 of 3"]), (Terminal(), ["1 of 3", "2 of 3", "3 of 3"])]
)
def test_the_compilers_progress_is_shown(stream, counts):
    assert list(install_native.watch(SAID, install_native.Progress(stream))) == SAID
    shown = stream.getvalue().replace("\r", "\n").split("\n")
    assert [line.split("compiled ")[1].split(",")[0] for line in shown if "compiled" in line] == counts
