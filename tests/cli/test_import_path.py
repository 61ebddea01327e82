"""A command imports nothing of the folder that it is called in, so far as that is in its hands."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.cli.main import without_current_folder

LIBRARY = os.path.dirname(os.__file__)


def test_only_an_empty_entry_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = os.getcwd()
    path = ["/bin", here, "/plugins", LIBRARY, here]
    for entries in (["", "/plugins"], ["/plugins", ""], ["", "/plugins", ""]):
        random.shuffle(entries)
        assert without_current_folder(path, os.pathsep.join(entries)) == ["/bin", "/plugins", LIBRARY, here]
    for named in ("", "/plugins", here, f"{os.pathsep}{here}", f".{os.pathsep}"):
        assert without_current_folder(path, named) == path


def test_a_folder_that_is_gone_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert without_current_folder(["/bin", LIBRARY], os.pathsep) == ["/bin", LIBRARY]
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("options", [["-m", "tokenmill"], ["-P", "-m", "tokenmill"]])
def test_a_module_that_a_verb_needs_is_the_installed_one(tmp_path: Path, options: list[str]) -> None:
    for name in ("numpy", "msgspec", "decimal", "resource"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').close()")
    for python_path in (None, f"{os.pathsep}/elsewhere"):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {} if python_path is None else {"PYTHONPATH": python_path}
        command = [sys.executable, *options, "plan", "--help"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not (tmp_path / "ran").exists()
