"""Count lines of Python code per room, and by how many this branch changes each; 1 if the core outgrows its budget.

Counted are lines with code on them, not blank lines, comments or docstrings: explaining less saves nothing. The budget
holds for the core alone, since a newcomer reads all of it; elsewhere a reviewer judges the printed difference.

    python tools/count_lines.py [--core 5600] [--base REVISION]
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
ROOT = TOP / "src" / "tokenmill"
# The way of a request until its tokens are there.
CORE = ("core/request.py", "core/plan.py", "engine/scheduler", "engine/kv", "engine/loop", "engine/runner")
BASES = ("origin/main", "main")


def code_lines(source: str) -> int:
    """Return how many lines of a file's text hold code."""
    texts = (line.lstrip() for line in source.splitlines())
    lines = {number for number, text in enumerate(texts, 1) if text and not text.startswith("#")}
    return len(lines - docstring_lines(ast.parse(source)))


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all docstrings; strings below attributes and aliases count as such."""
    strings = (
        node
        for node in _statements(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Return the statements below a node, not their expressions, which are most of a tree."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, name, ()):
            yield inner
            yield from _statements(inner)


def part_of(path: Path) -> str:
    """Name the row of the table in which a file counts: its room, or itself where only the file is core."""
    relative = path.relative_to(ROOT)
    if relative.as_posix() in CORE:
        return relative.as_posix()
    return "/".join(relative.parts[:-1][:2]) or "(top)"


def git(*arguments: str) -> str:
    """Return the output of a git command; an empty string if git is missing or the command fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=TOP, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def changes_since(base: str) -> Counter[str]:
    """Return by how many lines of code each part has grown (or, negative, shrunk) since a revision."""
    growth: Counter[str] = Counter()
    tracked = git("diff", "--name-only", "--no-renames", base, "--", "src/tokenmill").split()
    untracked = git("ls-files", "--others", "--exclude-standard", "--", "src/tokenmill").split()
    for name in {*tracked, *untracked}:
        path = TOP / name
        if path.suffix == ".py":
            now = path.read_text(encoding="utf-8") if path.exists() else ""
            growth[part_of(path)] += code_lines(now) - code_lines(git("show", f"{base}:{name}"))
    return growth


def main() -> int:
    """Print the table; return 1 if the core exceeds its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--core", type=int, default=5600, help="budget of a request's way: core, scheduler, engine ...")
    parser.add_argument("--base", help="count changes since this revision; by default since the branch left main")
    options = parser.parse_args()
    base = options.base or next(filter(None, (git("merge-base", "HEAD", main).strip() for main in BASES)), "")
    growth = changes_since(base) if base else Counter()
    lines: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        lines[part_of(path)] += code_lines(path.read_text(encoding="utf-8"))
    for part in (*CORE, *sorted({*lines, *growth} - {*CORE})):
        change = f"{growth[part]:+d}" if growth[part] else ""
        print(f"{lines[part]:7d} {change:>6s}  {part}")
    core = sum(lines[part] for part in CORE)
    print(f"{lines.total():7d} {growth.total():+6d}  in all")
    print(f"{core:7d}  of {options.core} lines of Python code: the core")
    return int(core > options.core)


if __name__ == "__main__":
    sys.exit(main())
