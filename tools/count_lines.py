"""Lines of Python code per folder of the engine, against its budget. `make lines` runs this.

Counted are lines with code on them, not blank lines, comments or docstrings: explaining less saves nothing.

    python tools/count_lines.py [--most 15000]
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
    """Print the table; 1 if the budget is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=15000, help="the budget")
    most = parser.parse_args().most
    lines: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).parts
        lines[parts[0] if len(parts) > 1 else "(top)"] += code_lines(path.read_text(encoding="utf-8"))
    for folder, count in sorted(lines.items()):
        print(f"{count:7d}  {folder}")
    print(f"{lines.total():7d}  of {most} lines of Python code")
    return int(lines.total() > most)


if __name__ == "__main__":
    sys.exit(main())
