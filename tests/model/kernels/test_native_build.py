"""Check what is built, the message where nothing can be, and what the stub promises."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.source_tree import ROOT
from tests.model.kernels.native import ISAS, native
from tokenmill.model.kernels import native as door
from tokenmill.model.kernels.native import load_kernels


def names(body: list[ast.stmt]) -> set[str]:
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)} - {"__init__"}


def test_the_stub_names_what_the_module_has():
    stub = ast.parse((ROOT / "src" / "tokenmill" / "_native.pyi").read_text()).body
    constants = {node.target.id for node in stub if isinstance(node, ast.AnnAssign) and node.value is None}
    assert names(stub) | constants == {name for name in dir(native) if not name.startswith("_")}
    for node in stub:
        if isinstance(node, ast.ClassDef):
            found = {name for name in vars(getattr(native, node.name)) if not name.startswith("_")}
            assert names(node.body) == found, node.name


def test_the_best_level_is_taken_unless_another_is_named():
    best = load_kernels(1)
    assert best is not None
    assert best.isa == ISAS[-1]
    with pytest.raises(ValueError, match="threads must be at least 1"):
        load_kernels(0)


def test_without_the_extension_there_are_no_native_kernels(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(door.importlib, "import_module", missing)
    assert load_kernels(1) is None


def test_without_a_compiler_nothing_is_built_and_one_line_says_so(tmp_path):
    cmake = Path(sys.executable).with_name("cmake")
    if not cmake.exists():
        pytest.skip("cmake is not installed beside this Python")
    command = [str(cmake), "-S", str(ROOT / "native"), "-B", str(tmp_path)]
    environment = {**os.environ, "CXX": str(tmp_path / "no-compiler")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "native kernels: not built (no C++ compiler); torch kernels serve" in done.stderr


def test_importing_tokenmill_does_not_load_the_extension():
    code = "import sys, tokenmill; sys.exit('tokenmill._native' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert importlib.util.find_spec("tokenmill._native") is not None
