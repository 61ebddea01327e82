"""What the check found, for machines (JSON) and for people (Markdown)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_report(folder: Path, found: dict[str, Any]) -> tuple[Path, Path]:
    """`gpu_check.json` and `gpu_check.md` in a folder that is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "gpu_check.json", folder / "gpu_check.md"
    paths[0].write_text(json.dumps(found, indent=2) + "\n")
    paths[1].write_text(markdown(found))
    return paths


def markdown(found: dict[str, Any]) -> str:
    """Tables of the parts that were run."""
    lines = ["# GPU check", ""]
    if found["is_dry"]:
        lines += ["A dry run on a CPU: it shows that the check works. Its figures say nothing of any GPU.", ""]
    lines += table(["", ""], [[name, value] for name, value in found.get("machine", {}).items()])
    for part in ("kernels", "engine"):
        if part in found:
            rows = [[row["check"], verdict(row["passed"]), row["detail"].splitlines()[-1]] for row in found[part]]
            lines += [f"## {part}", "", *table(["check", "", "detail"], rows)]
    if "benchmarks" in found:
        lines += ["## benchmarks", "", *table(["model", "what", "ms", "floor ms", "of the floor", "more"], [
            [row["model"], row["what"], *(number(row.get(key)) for key in ("ms", "floor_ms")), share(row), more(row)]
            for row in found["benchmarks"]
        ])]  # fmt: skip
    return "\n".join(lines)


def table(head: list[str], rows: list[list[Any]]) -> list[str]:
    """Markdown lines, an empty one behind them."""
    cells = [[str(cell).replace("|", "/") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return [*(f"| {' | '.join(row)} |" for row in cells), ""]


def verdict(passed: bool | None) -> str:
    """In a word."""
    return {True: "passed", False: "FAILED", None: "not run"}[passed]


def number(value: float | None) -> str:
    """Three digits."""
    return "" if value is None else f"{value:.3g}"


def share(row: dict[str, Any]) -> str:
    """How near a measurement comes to its floor."""
    return f"{row['of_floor']:.0%}" if "of_floor" in row else ""


def more(row: dict[str, Any]) -> str:
    """What only some rows have."""
    if "tokens_per_s" in row:
        return f"{row['tokens']} tokens in {row['seconds']:.1f} s: {row['tokens_per_s']:,.0f} tokens/s"
    if "tflops" in row:
        return f"{row['tflops']:.1f} TFLOP/s"
    if "idle" in row:
        return f"idle {row['idle']:.0%} of a step"
    return row.get("skipped", row.get("failed", ""))
