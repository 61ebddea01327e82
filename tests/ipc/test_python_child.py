"""Children of ours run installed code only, and so do theirs."""

from __future__ import annotations

import json
import os
import signal
import site
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from tests.ipc.traps import caught, lay_traps
from tests.serving.server.running_server import REPOSITORY
from tokenmill.ipc import python_child
from tokenmill.ipc.python_child import child_environment, python_command, run_python, start_python

IMPORTS = "import json, resource, decimal, numpy, msgspec, tokenmill.core.errors; print(json.dumps(1))"
GRANDCHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IMPORTS!r}], check=True)"
# All forms with an empty entry, which means the current folder.
EMPTY = ["", os.pathsep, f"{os.pathsep}/elsewhere", f"/elsewhere{os.pathsep}", f"/a{os.pathsep}{os.pathsep}/b"]


@pytest.mark.parametrize("code", [IMPORTS, GRANDCHILD], ids=["child", "grandchild"])
@pytest.mark.parametrize("python_path", [None, *EMPTY])
def test_nothing_of_the_current_folder_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_path: str | None, code: str
) -> None:
    marker = lay_traps(tmp_path / "traps")
    monkeypatch.chdir(tmp_path / "traps")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if python_path is not None:
        monkeypatch.setenv("PYTHONPATH", python_path)
    assert run_python(["-c", code], capture_output=True).stdout == b"1\n"
    assert caught(marker) == []
    monkeypatch.delenv("PYTHONPATH", raising=False)
    subprocess.run([sys.executable, "-c", "import decimal"], check=False, capture_output=True)
    assert "decimal" in caught(marker), "the traps work"


def test_folders_that_are_named_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin.py").write_text("name = 'mine'")
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{tmp_path}{os.pathsep}")
    assert run_python(["-c", "import plugin; print(plugin.name)"], capture_output=True).stdout == b"mine\n"


def test_the_users_own_site_folder_is_left_out_unless_we_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert python_command(["-m", "x"]) == [sys.executable, "-P", "-s", "-m", "x"]
    assert child_environment()["PYTHONNOUSERSITE"] == "1"
    ours = str(Path(python_child.__file__).parents[3])
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(site, "getusersitepackages", lambda: ours)
    monkeypatch.setattr(sys, "path", [*sys.path, ours])
    assert "-s" in python_command([]), "it is on the path, and we are installed elsewhere"
    installed = str(distribution("tokenmill").locate_file(""))
    monkeypatch.setattr(site, "getusersitepackages", lambda: installed)
    assert python_command([]) == [sys.executable, "-P"]
    monkeypatch.delenv("PYTHONNOUSERSITE", raising=False)
    assert "PYTHONNOUSERSITE" not in child_environment()


def test_variables_of_this_process_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_USER", "kept")
    found = child_environment({"OF_THE_USER": "default", "OF_OURS": "default"})
    assert (found["OF_THE_USER"], found["OF_OURS"]) == ("kept", "default")


def test_a_child_has_a_session_of_its_own_and_no_files() -> None:
    code = "import json, os; print(json.dumps([os.getsid(0), os.getpid(), os.path.exists('/proc/self/fd/%d')]))"
    with open(os.devnull) as file:
        os.set_inheritable(file.fileno(), True)
        with start_python(["-c", code % file.fileno()], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            session, pid, inherits = json.loads(child.stdout.read())
    assert session == pid == child.pid
    assert not inherits


def test_a_process_is_replaced() -> None:
    successor = "import os, sys; os.kill(os.getpid(), 9 if sys.flags.safe_path else 2)"
    code = f"from tokenmill.ipc.python_child import become_python; become_python(['-c', {successor!r}])"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


FORKED = """
import decimal, json, os, subprocess, sys, threading
from tokenmill.ipc.python_child import fork_python

how, has_thread = sys.argv[1], sys.argv[2] == "thread"
os.environ["OF_THE_USER"] = "kept"
held = os.open(os.devnull, os.O_RDONLY)
os.set_inheritable(held, True)
if has_thread:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
print("of the parent", end=" ")
variables = {"OF_THE_USER": "default", "OF_OURS": "default"}
child = fork_python("tests.ipc.forked", [how, str(held)], variables, **pipes)
said = child.communicate(b"hello\\n")[0].decode().splitlines()
print(json.dumps({"pid": child.pid, "code": child.returncode, "facts": json.loads(said[0]), "rest": said[1:]}))
"""


def fork(how: str, kind: str = "alone") -> dict[str, Any]:
    """Run `tests.ipc.forked` in a fork of a process with `decimal`; return what both say."""
    done = run_python(["-c", FORKED, how, kind], capture_output=True, cwd=REPOSITORY)
    assert done.stderr == b""
    words = done.stdout.decode()
    assert words.startswith("of the parent {"), "what the parent has not written yet is written once"
    found: dict[str, Any] = json.loads(words.removeprefix("of the parent "))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="other systems start a new interpreter")
@pytest.mark.parametrize("kind", ["alone", "thread"])
def test_a_fork_is_like_a_new_process_but_for_what_it_has_imported(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    found = fork("return", kind)
    facts = found["facts"]
    assert facts["has_decimal"] == (kind == "alone"), "a process with threads is not copied"
    assert facts["pid"] == found["pid"] == facts["session"]
    assert facts["descriptors"] == [0, 1, 2] and not facts["holds"]
    assert facts["argv"][1] == "return" and facts["word"] == "hello\n"
    assert facts["variables"] == {"OF_THE_USER": "kept", "OF_OURS": "default"}
    assert facts["title"] == ["-P", "-s", "-m", "tests.ipc.forked", *facts["argv"][1:]]
    assert facts["pipes"] and facts["is_collecting"]
    assert found["code"] == 0 and found["rest"] == ["a line of errors"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems start a new interpreter")
@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("code", 7, "a line of errors"),
        ("sentence", 1, "it ends"),
        ("error", 1, "ValueError: a fault"),
        ("signal", -signal.SIGKILL, None),
    ],
)
def test_the_end_of_a_fork_is_told_as_that_of_a_process(
    monkeypatch: pytest.MonkeyPatch, how: str, code: int, last: str | None
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    found = fork(how)
    assert found["code"] == code
    assert last is None or found["rest"][-1] == last


@pytest.mark.skipif(sys.platform != "linux", reason="other systems start a new interpreter")
def test_a_fork_runs_nothing_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = lay_traps(tmp_path / "traps")
    monkeypatch.chdir(tmp_path / "traps")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    code = "from tokenmill.ipc.python_child import fork_python as f; print(f('tokenmill', ['version']).wait())"
    assert run_python(["-c", code], capture_output=True).stdout.endswith(b"0\n")
    assert caught(marker) == []
