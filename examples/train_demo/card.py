"""The measured part of the model's card, between two marks that this module alone writes between."""

from __future__ import annotations

from pathlib import Path

from free_phrasings import Free

BEGIN, END = "<!-- accuracy: written by evaluate.py -->", "<!-- end of accuracy -->"
Scores = dict[str, tuple[int, int]]
FreeReply = tuple[Free, str, bool]


def free_lines(replies: list[FreeReply]) -> list[str]:
    """A table of free requests, the beginning of each reply, and whether it was good."""
    lines = ["| request | reply | good |", "|---|---|---|"]
    for free, reply, good in replies:
        asked = " / ".join(free.turns)
        short = " ".join(reply.split())
        short = f"{short[:90]}…" if len(short) > 90 else short
        cells = (cell.replace("|", "\\|").replace("<", "\\<") for cell in (asked, short, "yes" if good else "no"))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_card(card: Path, scores: Scores, told: list[tuple[str, str]], replies: list[FreeReply]) -> None:
    """Put the scores, the stories and the free requests between the card's two marks."""
    lines = ["| skill | right | of | accuracy |", "|---|---|---|---|"]
    for skill, (right, total) in scores.items():
        lines.append(f"| {skill} | {right} | {total} | {100 * right / total:.1f}% |")
    good = sum(good for _, _, good in replies)
    lines += [
        "",
        f"Of {len(replies)} requests as a new user may type them, {good} got a good reply:",
        "",
    ]
    lines += free_lines(replies)
    lines += ["", "The first ten stories of that run, as they came:", ""]
    lines += [f"- *{question}* {story}" for question, story in told]
    head, rest = card.read_text().split(BEGIN)
    card.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}" + rest.split(END)[1])
