import contextlib
import io
import os
import shutil
import subprocess
from functools import cache

import pytest

from tests.house.source_tree import ROOT
from tools import count_lines

OUTER_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "MODEL", "PORT", "PYTHON")
# The hash that every git repository gives to a tree without files: since then, every line is a change.
GIT_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


def make(*arguments: str) -> str:
    # A make that runs these tests passes its own flags on; they would change what is under test.
    environment = {name: value for name, value in os.environ.items() if name not in OUTER_MAKE}
    command = ["make", "--no-print-directory", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(*arguments: str) -> list[str]:
    """Return the commands that make would run, without the parts that depend on whether everything is installed."""
    return make("--dry-run", *arguments).splitlines()


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["serve"], "tokenmill serve"),
        (["serve", "MODEL=a b"], 'tokenmill serve "a b"'),
        (
            ["serve", "MODEL=path", "PORT=8001", "ARGS=--seed 3 --dtype float32"],
            'tokenmill serve "path" --port "8001" --seed 3 --dtype float32',
        ),
    ],
)
def test_make_serve_passes_on(arguments, command):
    last = commands(*arguments)[-1]
    assert " ".join(last.split()).removeprefix("exec .venv/bin/") == command


def test_those_who_only_serve_compile_for_their_machine_alone(tmp_path):
    """Tests run all instruction sets, and a machine that has them all compiled serves with them."""
    nothing = f"VENV={tmp_path}/none"
    assert "install_native.py --local" in make("--dry-run", nothing, "serve")
    tests = make("--dry-run", nothing, "test")
    assert "install_native.py" in tests and "--local" not in tests


def test_every_target_is_in_the_help():
    text = make("help")
    for target in ("serve", "test", "lint", "format", "lines", "bench", "clean", "help"):
        assert f"make {target} " in text


def test_an_interpreter_that_is_not_fit_is_passed_over(tmp_path):
    """As on a machine whose `python3.12` is a version manager's stub that only prints a message."""
    stub = tmp_path / "python3"
    stub.write_text("#!/bin/sh\nexit 127\n")
    stub.chmod(0o755)
    make = shutil.which("make")
    assert make is not None
    done = subprocess.run(
        [make, f"VENV={tmp_path}/venv", f"{tmp_path}/venv/bin/python"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "Python 3.11, 3.12 or 3.13 with its venv module is needed" in done.stderr


@pytest.fixture(scope="module")
def count():
    """Count lines with these flags, as `make lines` does: return the exit status and what is printed."""
    with pytest.MonkeyPatch.context() as patch:
        # Three seconds for all files, once.
        patch.setattr(count_lines, "code_lines", cache(count_lines.code_lines))

        def call(*flags: str) -> tuple[int, list[str]]:
            patch.setattr("sys.argv", ["count_lines.py", *flags])
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                status = count_lines.main()
            return status, printed.getvalue().splitlines()

        yield call


def test_make_counts_lines_with_the_flags_that_it_is_given():
    assert commands("lines", "LINES_ARGS=--core 10")[-1].endswith("python tools/count_lines.py --core 10")


def test_the_budget_of_the_core_is_counted_and_kept(count):
    status, printed = count()
    of_core = next(words for line in printed if "of" in (words := line.split()))
    assert 0 < int(of_core[0]) <= int(of_core[2])
    assert status == 0


def test_lines_are_counted_as_changes_since_a_revision(count):
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    _, table = count("--base", GIT_EMPTY_TREE)
    lines, change = next(line.split() for line in table if line.endswith("  in all"))[:2]
    assert int(change) == int(lines)


def test_the_line_budget_can_be_exceeded(count):
    assert count("--core", "10")[0] == 1


def test_ci_asks_for_a_browser_and_calls_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    lines = [line for line in script.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -e", 'cd "$(dirname "$0")/.."', "make browser", "make test"]
