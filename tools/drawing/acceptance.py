"""Draw the gain of speculation by the share of its drafts that are right: a line for each format of the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.drawing.svg import ACCENT, CACHED, DECODE, FREE, PALE, PROMPT, Sheet

LEFT, TOP, WIDTH, HEIGHT = 60.0, 50.0, 520.0, 280.0
NAMES = {"none": "bfloat16"}
COLOURS = (PROMPT, DECODE, CACHED, ACCENT)


def draw_acceptance(results: Iterable[Path]) -> str:
    """The picture of the last lines of `benchmarks/speculation.py`, a file for each format."""
    documents = [json.loads(path.read_text(encoding="utf-8").splitlines()[-1]) for path in results]
    highest = max(ratio(row) for document in documents for row in of_one(document))
    top = max(2, int(highest) + 1)
    sheet = Sheet(LEFT + WIDTH + 30, TOP + HEIGHT + 60, "Speed with speculation against the share of drafts accepted")

    def place(share: float, times: float) -> tuple[float, float]:
        return LEFT + share * WIDTH, TOP + HEIGHT - times / top * HEIGHT

    sheet.text(LEFT, 22, "Speed over plain decoding by the share of draft tokens that were right", 13)
    for times in range(top + 1):
        sheet.line([place(0, times), place(1, times)], PALE if times == 1 else FREE)
        sheet.text(LEFT - 8, place(0, times)[1] + 4, f"{times}x", 11, place="end")
    for tenth in range(0, 11, 2):
        sheet.text(place(tenth / 10, 0)[0], TOP + HEIGHT + 18, f"{tenth * 10}%", 11, place="middle")
    for colour, document in zip(COLOURS, documents, strict=False):
        points = sorted((row["accepted"], ratio(row)) for row in of_one(document))
        sheet.line([place(*point) for point in points], colour)
        for share, times in points:
            x, y = place(share, times)
            sheet.box(x - 3, y - 3, 6, 6, colour, hint=f"{share:.0%} right: {times:.2f}x")
    names = [NAMES.get(document["quantization"], document["quantization"]) for document in documents]
    sheet.legend(LEFT, TOP + HEIGHT + 46, list(zip(COLOURS, names, strict=False)))
    return sheet.document()


def of_one(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The measurements of one stream with the suffix drafter."""
    return [row for row in document["rows"] if row["streams"] == 1 and row["method"] == "suffix" and row["accepted"]]


def ratio(row: dict[str, Any]) -> float:
    """The median of the ratios of neighbouring runs."""
    values = row["ratio"]
    return float(values[len(values) // 2])
