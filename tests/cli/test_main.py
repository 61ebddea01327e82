import os
import subprocess
import sys

import pytest

from tokenmill import __version__
from tokenmill.cli.main import VERBS, main

HEAVY = ("torch", "numpy", "starlette", "uvicorn", "rich", "httpx", "yaml", "zmq", "tokenizers", "huggingface_hub")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tokenmill", *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--help"], *([verb, "--help"] for verb in VERBS), ["serve", "--prot", "1"]])
def test_help_and_mistakes_import_nothing_heavy(arguments):
    code = (
        "import sys\nfrom tokenmill.cli.main import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        f"sys.exit(repr([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().splitlines()[-1] == "[]"


def test_help_names_every_verb():
    done = run("--help")
    assert done.returncode == 0
    assert all(f"\n  {verb} " in done.stdout for verb in VERBS)


def test_no_verb_is_a_question_for_help():
    assert run().stdout == run("--help").stdout


def test_unknown_verb_is_answered_with_the_one_that_was_meant(capsys):
    assert main(["srve"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err


def test_version_flag_prints_the_version_alone(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_version_verb_names_python_and_torch(capsys):
    assert main(["version"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["tokenmill"] == __version__
    assert lines["python"] == sys.version.split()[0]
    assert lines["torch"].startswith("2.")


def test_an_error_is_one_sentence_and_its_exit_code(tmp_path):
    done = run("generate", "-i", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    assert done.returncode == 2
    assert done.stderr == f"tokenmill: there is no input file {tmp_path}/none.jsonl\n"


def test_a_reader_that_leaves_early_sees_no_traceback():
    command = f"{sys.executable} -m tokenmill serve --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: tokenmill serve")
    assert done.stderr == ""


PRINTING = (["--help"], ["--version"], ["version"], ["list"], ["completion", "bash"], ["estimate"])


def shell(redirection: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    script = f'"$0" -m tokenmill "$@" {redirection}'
    return subprocess.run(
        ["bash", "-c", script, sys.executable, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("arguments", PRINTING)
def test_a_full_disk_behind_the_output_is_one_sentence(arguments):
    done = shell("> /dev/full", arguments)
    assert (done.returncode, done.stderr) == (1, "tokenmill: the output cannot be written: No space left on device\n")
    assert shell("> /dev/full 2>&1", arguments).returncode == 1


@pytest.mark.parametrize("arguments", PRINTING)
def test_who_wants_no_output_gets_none(arguments):
    done = shell(">&- 2>&- <&-", arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("arguments", PRINTING)
def test_a_reader_that_has_ended_before_hears_nothing_of_it(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "tokenmill", *arguments], stdout=output, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_an_error_that_nobody_can_read_keeps_its_exit_code(tmp_path):
    arguments = ["generate", "-i", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    assert [shell(to, arguments).returncode for to in ("2> /dev/full", "2>&-", "> /dev/full 2>&1")] == [2, 2, 2]
