"""Print a number below 2^32 that stands for a tree: the seed of the random inputs of `make test`.

A checksum of all that decides how tests behave: sources, native code, tests, pins. The same tree draws the same inputs
in every run and on every machine; a change draws others. Documents, caches and built files do not count, nor does git.

    python tools/tree_seed.py [FOLDER]
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

PARTS = ("src", "native", "tests", "requirements", "pyproject.toml")
# Neither written by people nor the same on every machine.
BUILT_FOLDERS = ("__pycache__", "build", "dist", "node_modules")
BUILT_SUFFIXES = (".pyc", ".so", ".pyd", ".dylib", ".o", ".a", ".log", ".egg-info")


def tree_seed(root: Path) -> int:
    """Return the number of the tree below `root`."""
    digest = hashlib.sha256()
    for path in deciding_files(root):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    return int.from_bytes(digest.digest()[:4], "big")


def deciding_files(root: Path) -> Iterator[Path]:
    """Yield the files whose contents count, in an order that no file system decides."""
    paths = (path for part in PARTS for path in (root / part, *(root / part).rglob("*")))
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        if path.is_file() and not any(map(_is_left_out, path.relative_to(root).parts)):
            yield path


def _is_left_out(name: str) -> bool:
    return name.startswith(".") or name.endswith((*BUILT_SUFFIXES, ".md", "~")) or name in BUILT_FOLDERS


if __name__ == "__main__":
    print(tree_seed(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
