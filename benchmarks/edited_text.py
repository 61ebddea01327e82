"""Texts of random tokens, and what follows them: a copy with edits, or something that has nothing to do with them."""

from __future__ import annotations

import random

VOCAB_SIZE = 151_936


def edited(text: list[int], rate: float, rng: random.Random) -> list[int]:
    """A text of which this share of tokens is replaced, left out, or followed by another."""
    made: list[int] = []
    for token in text:
        other = rng.randrange(VOCAB_SIZE)
        made += rng.choice([[], [other], [token, other]]) if rng.random() < rate else [token]
    return made


def texts(kind: str, number: int, length: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """A prompt whose first token tells its number, and what follows it; see `benchmarks/speculation.py`."""
    words = range(100) if kind == "words" else range(VOCAB_SIZE)
    text = [rng.choice(words) for _ in range(length)]
    name, _, rate = kind.partition(":")
    trace = edited(text, float(rate or 0.05), rng) if name == "edits" else [rng.choice(words) for _ in range(length)]
    return [64 + number, *text], trace
