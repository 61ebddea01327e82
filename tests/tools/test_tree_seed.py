"""The seed of a tree: the same wherever the tree lies, another as soon as something that decides behaviour changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.tree_seed import deciding_files, tree_seed

from tests.house.source_tree import ROOT

FILES = {
    "src/tokenmill/a.py": "a",
    "native/b.cpp": "b",
    "tests/c/d.py": "d",
    "requirements/dev.txt": "e",
    "pyproject.toml": "f",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return grown(tmp_path / "one", list(FILES))


def grown(root: Path, names: list[str]) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(FILES[name])
    return root


def test_neither_the_place_nor_the_order_of_files_counts(tree: Path, tmp_path: Path) -> None:
    assert tree_seed(tree) == tree_seed(grown(tmp_path / "two", list(FILES)[::-1]))
    assert 0 <= tree_seed(tree) < 2**32


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_a_file_that_decides_counts(tree: Path, name: str) -> None:
    before = tree_seed(tree)
    (tree / name).write_text("other")
    changed = tree_seed(tree)
    (tree / name).rename(tree / f"{name}.txt")
    assert len({before, changed, tree_seed(tree)}) == 3


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "docs/index.md",
        "src/tokenmill/README.md",
        "src/tokenmill/__pycache__/a.cpython-311.pyc",
        "src/tokenmill/native.abi3.so",
        "src/tokenmill.egg-info/PKG-INFO",
        "native/build/b.o",
        "tests/.pytest_cache/x",
        ".git/HEAD",
        "examples/x.py",
    ],
)
def test_documents_caches_and_built_files_do_not_count(tree: Path, name: str) -> None:
    before = tree_seed(tree)
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    (tree / name).write_text("x")
    assert tree_seed(tree) == before


def test_what_decides_here_is_sources_and_pins() -> None:
    names = [path.relative_to(ROOT).as_posix() for path in deciding_files(ROOT)]
    assert {"pyproject.toml", "requirements/dev.txt", "tests/seeding.py", "src/tokenmill/__init__.py"} <= set(names)
    assert not [name for name in names if name.endswith((".pyc", ".so"))]
