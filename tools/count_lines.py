"""Lines of Python code per folder, against a budget for each part of the house; 1 if one is exceeded.

Counted are lines with code on them, not blank lines, comments or docstrings: explaining less saves nothing.

    python tools/count_lines.py [--core 5400]
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
# What one reads in an afternoon: a request, and what becomes of it until its tokens are there.
CORE = ("core/request.py", "core/plan.py", "scheduler", "kv", "engine", "runner")
MODEL = ("attention", "kernels", "models", "platform", "quantization", "sampling", "structured", "weights")
USER_SIDE = ("cli", "frontend", "llm", "observe", "server")
BOTH_SIDES = ("core", "ipc", "demo", "(top)")
# A room inside another: a capability of its own, which whoever reads the command line, has no GPU, or files of another
# kind, may skip.
INNER_ROOMS = (
    "cli/bench",
    "frontend/tool_parsers",
    "kernels/triton",
    "parallel/devices",
    "parallel/pipeline",
    "replicas/siblings",
    "server/siblings",
    "transfer/remote",
    "weights/gguf",
)
ROOM_BUDGET = 1350
# Every capability has messages and flags of its own.
BOTH_SIDES_BUDGET = 2000
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


def part_of(path: Path) -> str:
    """The line of the table that a file counts in: its folder, or itself where it is part of the core alone."""
    relative = path.relative_to(ROOT)
    if relative.as_posix() in CORE:
        return relative.as_posix()
    inner = "/".join(relative.parts[:2])
    if inner in INNER_ROOMS:
        return inner
    return relative.parts[0] if len(relative.parts) > 1 else "(top)"


def main() -> int:
    """Print the table; 1 if a budget is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--core", type=int, default=5400, help="budget of a request's way: core, scheduler, engine ...")
    parser.add_argument("--model", type=int, default=13000, help="budget of all that runs a model, the core included")
    parser.add_argument("--user-side", type=int, default=10500, help="budget of the command line, HTTP and text")
    budgets = parser.parse_args()
    lines: Counter[str] = Counter()
    for path in ROOT.rglob("*.py"):
        lines[part_of(path)] += code_lines(path.read_text(encoding="utf-8"))
    core = show("the core", lines, CORE, budgets.core)
    model = show("all that runs a model, with the core", lines, MODEL, budgets.model, sum(lines[part] for part in CORE))
    user = show("user's side", lines, USER_SIDE, budgets.user_side)
    both = show("what both sides share", lines, BOTH_SIDES, BOTH_SIDES_BUDGET)
    rooms = set(lines) - {*CORE, *MODEL, *USER_SIDE, *BOTH_SIDES}
    large = [room for room in sorted(rooms) if show(f"the room {room}/", lines, (room,), ROOM_BUDGET)]
    return int(core or model or user or both or bool(large))


def show(name: str, lines: Counter[str], parts: tuple[str, ...], budget: int, others: int = 0) -> bool:
    """Print one group of the table; True if it exceeds its budget.

    Args:
        others: lines that belong to it and are printed already.
    """
    for part in parts:
        print(f"{lines[part]:7d}  {part}")
    total = sum(lines[part] for part in parts) + others
    print(f"{total:7d}  of {budget} lines of Python code: {name}")
    return total > budget


if __name__ == "__main__":
    sys.exit(main())
