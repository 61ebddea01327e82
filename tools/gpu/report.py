"""Report what the check found, for machines (JSON) and for people (Markdown)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Results:
    """Rows as they come: printed, and kept where a killed run leaves them; at the end the report.

    Attributes:
        has_failed: whether a check failed, or a measurement could not be made.
    """

    def __init__(self, folder: Path, is_dry: bool, seed: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lines = folder / "results.jsonl"
        self._lines.write_text("")
        self._found: dict[str, Any] = {"is_dry": is_dry, "seed": seed}
        self.has_failed = False

    def record(self, row: dict[str, Any]) -> None:
        """Keep a row and print it; its `part` says where it belongs."""
        with self._lines.open("a") as file:
            file.write(json.dumps(row) + "\n")
        part, row = row["part"], {key: value for key, value in row.items() if key != "part"}
        self.has_failed |= row.get("passed") is False
        if part == "machine" and "check" not in row:
            self._found["machine"] = row
        else:
            self._found.setdefault(part, []).append(row)
        print(f"{part}: {one_line(row)}", flush=True)

    def finish(self, seconds: float) -> str:
        """Write gpu_check.json and gpu_check.md; what to say last."""
        self._found["seconds"] = seconds
        text = markdown(self._found)
        paths = self._folder / "gpu_check.json", self._folder / "gpu_check.md"
        paths[0].write_text(json.dumps(self._found, indent=2) + "\n")
        paths[1].write_text(text)
        return f"{text}\nwritten to {paths[0]} and {paths[1]}; {seconds:.0f} s in all"


def one_line(row: dict[str, Any]) -> str:
    """A row while it runs."""
    if "check" in row:
        return f"{verdict(row['passed'])}  {row['check']}  {last_line(row['detail'])}"
    return "  ".join(f"{name} {number(value) if isinstance(value, float) else value}" for name, value in row.items())


def last_line(detail: str) -> str:
    """Of an error what it comes to."""
    return next(reversed(detail.splitlines()), "")


def markdown(found: dict[str, Any]) -> str:
    """Tables of the parts that were run."""
    lines = ["# GPU check", ""]
    if found["is_dry"]:
        lines += ["A dry run on a CPU: it shows that the check works. Its figures say nothing of any GPU.", ""]
    lines += table(["", ""], [[name, value] for name, value in found.get("machine", {}).items()])
    for part in ("kernels", "engine", "benchmarks"):
        rows = found.get(part, [])
        lines += [f"## {part}", ""] if rows else []
        measured = [row for row in rows if "check" not in row]
        if measured:
            lines += table(
                ["model", "what", "ms", "floor ms", "of the floor", "more"], list(map(measurement, measured))
            )
        checks = [row for row in rows if "check" in row]
        if checks:
            cells = [[row["check"], verdict(row["passed"]), last_line(row["detail"])] for row in checks]
            lines += table(["check", "", "detail"], cells)
    return "\n".join(lines)


def measurement(row: dict[str, Any]) -> list[str]:
    """The cells of one."""
    return [row["model"], row["what"], number(row.get("ms")), number(row.get("floor_ms")), share(row), more(row)]


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
    """Return how near a measurement comes to its floor."""
    return f"{row['of_floor']:.0%}" if "of_floor" in row else ""


def more(row: dict[str, Any]) -> str:
    """Return the values that only some rows have."""
    if "tokens_per_s" in row:
        return f"{row['tokens']} tokens in {row['seconds']:.1f} s: {row['tokens_per_s']:,.0f} tokens/s"
    if "tflops" in row:
        return f"{row['tflops']:.1f} TFLOP/s"
    if "idle" in row:
        return f"idle {row['idle']:.0%} of a step"
    return row.get("skipped", row.get("failed", ""))
