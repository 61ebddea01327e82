"""Saying so when something is out of the model's reach.

The split is by what is asked about (the topic, the word, the name), so a held-out question is about something that no
training question was about. Questions without a subject have no second wording, so they are always in training.
"""

from __future__ import annotations

import random

from .base import Sample, Split, assistant, casual, split_of, user
from .scope_frames import FRAMES, PLAIN
from .vocabulary import (
    CATEGORIES,
    CODE,
    COUNTRIES,
    DEEDS,
    EVENTS,
    EXTREMES,
    FEELINGS,
    FIELDS,
    LANGUAGES,
    ROLES,
    invented_noun,
    name_of,
    word_of,
)
from .words import article

SORRY = (
    "I am a small demo model, so I cannot help with that. I can answer questions about TokenMill, do sums, work "
    "with short lists, write JSON, call tools and tell short stories."
)


def _topic(rng: random.Random) -> str:
    """Anything that people ask about, as a noun phrase."""
    form = rng.randrange(6)
    if form <= 2:
        return rng.choice(FIELDS)
    if form == 3:
        return rng.choice(EVENTS)
    if form == 4:
        return rng.choice((f"the history of {rng.choice(COUNTRIES)}", rng.choice(COUNTRIES), f"{word_of(rng)}s"))
    word = word_of(rng) if rng.random() < 0.85 else invented_noun(rng)
    return rng.choice((f"the {word}", article(word)))


def _fills(rng: random.Random) -> dict[str, str]:
    word = word_of(rng) if rng.random() < 0.9 else invented_noun(rng)
    return {
        "t": _topic(rng),
        "e": rng.choice(EVENTS),
        "d": rng.choice(DEEDS),
        "p": rng.choice(ROLES),
        "n": name_of(rng),
        "m": name_of(rng),
        "w": word,
        "aw": article(word),
        "v": word_of(rng),
        "x": rng.choice(EXTREMES),
        "c": rng.choice(CATEGORIES),
        "k": rng.choice(COUNTRIES),
        "l": rng.choice(LANGUAGES),
        "f": rng.choice(FEELINGS),
        "code": rng.choice(CODE),
        "a": str(rng.randint(2, 999)),
        "b": str(rng.randint(2, 99)),
        "y": str(rng.randint(1000, 2030)),
    }


def _question(rng: random.Random) -> tuple[str, str]:
    """Return the subject of a question, and the question."""
    frame = rng.choice(rng.choice(FRAMES))
    fills = _fills(rng)
    subjects = [fills[slot] for slot in fills if "{" + slot + "}" in frame]
    return ":".join(subjects), frame.format(**fills)


def beyond(rng: random.Random, split: Split) -> Sample:
    """Something the model was not made for: it says so, and says what it can do."""
    if split == "train" and rng.random() < 0.06:
        text = rng.choice(PLAIN)
        return Sample("out of scope", f"scope:plain:{text}", (user(casual(rng, text)), assistant(SORRY)))
    while True:
        about, text = _question(rng)
        if split_of(f"scope:{about}") == split:
            break
    text = text.lower() if rng.random() < 0.08 else casual(rng, text)
    return Sample("out of scope", f"scope:{about}", (user(text), assistant(SORRY)))
