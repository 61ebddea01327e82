"""Completion: the scripts, run by the shells that are here, offer what the parsers know."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.eventually import patience
from tokenmill.cli.main import VERBS, main
from tokenmill.cli.serve import make_parser
from tokenmill.lab.bench import KINDS

ASK = {
    "bash": """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); COMPREPLY=()
_tokenmill
printf '%s\\n' "${{COMPREPLY[@]}}"
""",
    # What the shell itself would do with the words is to offer those that begin like the last one.
    "zsh": """
compdef() {{ }}
_files() {{ }}
compadd() {{ shift; for word in "$@"; do [[ "$word" == "$current"* ]] && print -r -- "$word"; done; true }}
source {script}
words=({words}); CURRENT=${{#words}}
_tokenmill
""",
    "fish": """
source {script}
complete -C "{line}" | string split -f 1 \\t
""",
}


@pytest.fixture(scope="module", params=sorted(ASK))
def shell(request: pytest.FixtureRequest) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"no {request.param} here")
    return request.param


@pytest.fixture
def offers(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Return the shell's offers for the last of some words."""
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)

    def ask(*words: str) -> set[str]:
        quoted = " ".join(f"'{word}'" for word in words)
        text = ASK[shell].format(script=script, words=quoted, line=" ".join(words))
        (tmp_path / "ask").write_text(text)
        command = [shell, *(["-f"] if shell == "zsh" else []), str(tmp_path / "ask")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=patience())
        assert done.stderr == ""
        return set(done.stdout.split())

    return ask


def test_verbs_flags_and_values_are_offered(offers) -> None:
    assert offers("tokenmill", "") == set(VERBS)
    assert offers("tokenmill", "ser") == {"serve"}
    assert offers("tokenmill", "bench", "") == set(KINDS)
    assert offers("tokenmill", "completion", "f") == {"fish"}
    assert offers("tokenmill", "serve", "--dtype", "b") == {"bfloat16"}
    assert offers("tokenmill", "serve", "-q", "int") == {"int8", "int4"}
    assert offers("tokenmill", "bench", "serve", "--burst") == {"--burstiness"}
    assert offers("tokenmill", "chat", "--burst") == set()
    flags = {flag for flag in make_parser()._option_string_actions if flag.startswith("--max")}
    assert len(flags) > 5
    assert offers("tokenmill", "serve", "MODEL", "--max") == flags


def test_another_shell_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["completion", "tcsh"])
    assert refused.value.code == 2
    assert "tcsh" in capsys.readouterr().err
