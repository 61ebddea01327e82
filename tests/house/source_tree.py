"""The Python files of this project and their syntax trees, for the tests of the house rules."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "benchmarks", "examples")


def files(*folders: str) -> list[Path]:
    """Every Python file below these folders of the repository."""
    return sorted(path for folder in folders or FOLDERS for path in (ROOT / folder).rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def place(path: Path, node: ast.AST) -> str:
    """`src/tokenmill/x.py:12`, for messages."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or an attribute chain, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def identifiers(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Every name that a file defines or uses, but for the keywords of calls: those may be other people's words."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Name():
                yield node.id, node
            case ast.Attribute():
                yield node.attr, node
            case ast.arg():
                yield node.arg, node
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
