"""Every Python child is started by `ipc/python_child.py`, so that none runs what lies in the current folder."""

import ast

import pytest

from tests.house.source_tree import ROOT, dotted, files, place, tree

HOME = ROOT / "src/tokenmill/ipc/python_child.py"
STARTERS = {"Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}
FORBIDDEN_IMPORTS = {"multiprocessing", "concurrent.futures.process", "pty", "runpy"}
FORBIDDEN_NAMES = {"ProcessPoolExecutor", "create_subprocess_exec", "create_subprocess_shell"}


def children(module: ast.Module) -> list[ast.AST]:
    """Return all that can start a program, or names the interpreter that would run."""
    return [node for node in ast.walk(module) if _starts(node)]


def _starts(node: ast.AST) -> bool:
    match node:
        case ast.Import():
            return any(_is_forbidden(alias.name) for alias in node.names)
        case ast.ImportFrom(module=str(source)):
            names = {alias.name for alias in node.names}
            return (
                _is_forbidden(source)
                or bool(names & FORBIDDEN_NAMES)
                or (source == "subprocess" and bool(names & STARTERS))
                or (source == "sys" and bool(names & {"executable", "orig_argv"}))
                or (source == "os" and any(map(_executes, names)))
            )
        case ast.Attribute():
            name, last = dotted(node), node.attr
            return last in FORBIDDEN_NAMES or name == "sys.executable" or (name.startswith("os.") and _executes(last))
        case ast.Call():
            owner, _, name = dotted(node.func).rpartition(".")
            return owner == "subprocess" and name in STARTERS
    return False


def _is_forbidden(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in FORBIDDEN_IMPORTS)


def _executes(name: str) -> bool:
    return name.startswith(("exec", "spawn", "posix_spawn"))


@pytest.mark.parametrize(
    "code",
    [
        "import sys\ncommand = [sys.executable, '-m', 'x']",
        "from sys import executable",
        "import subprocess\nsubprocess.Popen(['python3'])",
        "import subprocess\nsubprocess.run(['python3'])",
        "from subprocess import check_output",
        "import os\nos.execv('/usr/bin/python3', [])",
        "import os\nos.posix_spawn('/usr/bin/python3', [], {})",
        "from os import spawnl",
        "import multiprocessing",
        "from multiprocessing import get_context",
        "import multiprocessing.pool as pool",
        "from concurrent.futures import ProcessPoolExecutor",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
        "import asyncio\nasyncio.create_subprocess_exec('python3')",
    ],
)
def test_the_check_for_children_sees_them(code):
    assert children(ast.parse(code))


def test_what_only_speaks_of_processes_is_no_child():
    code = "import subprocess\np: subprocess.Popen[bytes]\nq = subprocess.PIPE\nimport os\nos.fork()\ns.run('x')"
    assert children(ast.parse(code)) == []


def test_one_file_starts_children():
    assert children(tree(HOME))
    found = [place(path, node) for path in files("src") if path != HOME for node in children(tree(path))]
    assert found == []
