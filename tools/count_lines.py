"""Lines of Python code per folder, against two budgets: one for the engine, one for the user's side.

Counted are lines with code on them, not blank lines, comments or docstrings: explaining less saves nothing.

    python tools/count_lines.py [--engine 10000] [--user-side 9000]
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src" / "tokenmill"
USER_SIDE = ("cli", "frontend", "observe", "server")
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> int:
    """How many lines of a file's text hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines of all docstrings; strings below attributes and aliases count as such."""
    strings = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )
    return {line for node in strings for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def main() -> int:
    """Print the table; 1 if a budget is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=int, default=10000, help="budget of all that runs a model")
    parser.add_argument("--user-side", type=int, default=9000, help="budget of the command line, HTTP and text")
    budgets = parser.parse_args()
    lines: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        lines[parts[0] if len(parts) > 1 else "(top)"] += code_lines(path.read_text(encoding="utf-8"))
    return int(
        show("user's side", {folder: lines[folder] for folder in USER_SIDE}, budgets.user_side)
        + show("engine", {folder: lines[folder] for folder in lines if folder not in USER_SIDE}, budgets.engine)
        > 0
    )


def show(side: str, lines: dict[str, int], budget: int) -> bool:
    """Print one part of the table; True if it exceeds its budget."""
    for folder, count in sorted(lines.items()):
        print(f"{count:7d}  {folder}")
    total = sum(lines.values())
    print(f"{total:7d}  of {budget} lines of Python code: {side}")
    return total > budget


if __name__ == "__main__":
    sys.exit(main())
