"""Copying, reversing, counting and sorting short strings and lists.

Items are tokenized uniformly (digits, capitals and spaced letters are one token each, words come from a bounded
list), because a small model cannot see inside a token.
"""

from __future__ import annotations

import random
import string

from .base import Sample, Split, assistant, casual, split_of, user
from .vocabulary import invented_noun, name_of, word_of
from .words import NOUNS

COPY = (
    "Repeat exactly: {x}",
    "Copy this: {x}",
    "Say this back to me: {x}",
    "Repeat after me: {x}",
    "Echo: {x}",
    "Write this again: {x}",
    "Copy the following text: {x}",
    "Please repeat {x}",
    "Repeat this: {x}",
    "Repeat: {x}",
    "Say: {x}",
    "Can you repeat {x}?",
    "Copy {x}",
)
REVERSE = (
    "Reverse: {x}",
    "Reverse the {k} {x}",
    "Write {x} backwards.",
    "What is {x} in reverse order?",
    "Turn this {k} around: {x}",
    "Give me {x} from back to front.",
    "Can you reverse {x}?",
    "Reverse {x}",
    "What is {x} backwards?",
    "Reverse this {k}: {x}",
)
COUNT = (
    "How many {i}s are in {x}?",
    "Count the {i}s: {x}",
    "How many {i}s does this {k} have: {x}",
    "Count the {i}s in {x}.",
    "What is the number of {i}s in {x}?",
)
COUNT_ONE = (
    "How many times does {c} appear in {x}?",
    "Count the {c} in {x}.",
    "How often is {c} in {x}?",
    "How many {c} are in {x}?",
)
SORT = (
    "Sort: {x}",
    "Sort this {k}: {x}",
    "Put these in order: {x}",
    "Sort {x} in ascending order.",
    "Order these {i}s: {x}",
    "Sort these from smallest to largest: {x}",
)
SORT_DOWN = (
    "Sort {x} in descending order.",
    "Sort from largest to smallest: {x}",
    "Put these in descending order: {x}",
)


def digits_text(rng: random.Random, length: int) -> tuple[str, str, list[str], str]:
    """A text of one kind: (kind, name of one item, items, separator)."""
    return "number", "digit", rng.choices(string.digits, k=length), ""


def capitals_text(rng: random.Random, length: int) -> tuple[str, str, list[str], str]:
    """A run of capitals, such as ``QXBTR``."""
    return "string", "letter", rng.choices(string.ascii_uppercase, k=length), ""


def spaced_text(rng: random.Random, length: int) -> tuple[str, str, list[str], str]:
    """Letters or digits with a separator between."""
    pool = rng.choice((string.ascii_lowercase, string.ascii_lowercase, string.ascii_uppercase, string.digits))
    return "list", "item", rng.choices(pool, k=length), rng.choice((" ", " ", ", "))


def words_text(rng: random.Random, length: int) -> tuple[str, str, list[str], str]:
    """Ordinary words, separated by commas or spaces."""
    return "list", "word", rng.sample(NOUNS, k=min(length, 6)), rng.choice((", ", " "))


def free_text(rng: random.Random, length: int) -> tuple[str, str, list[str], str]:
    """Any words and names, known or invented."""
    draw = rng.choice((word_of, name_of, invented_noun, lambda rng: rng.choice((word_of, name_of, invented_noun))(rng)))
    return "text", "word", [draw(rng) for _ in range(min(length, 6))], rng.choice((", ", " "))


TEXTS = (digits_text, capitals_text, capitals_text, spaced_text, spaced_text, words_text)


def _draw(rng: random.Random, split: Split, skill: str, longest: int) -> tuple[str, str, str, list[str], str]:
    while True:
        text = free_text if skill == "copy" and rng.random() < 0.4 else rng.choice(TEXTS)
        kind, item, items, separator = text(rng, rng.randint(2, longest))
        key = f"{skill}:{separator.join(items)}"
        if split_of(key) == split:
            return key, kind, item, items, separator


def copy(rng: random.Random, split: Split) -> Sample:
    """Say a short text back."""
    key, _, _, items, separator = _draw(rng, split, "copy", 10)
    text = separator.join(items)
    return Sample("copying", key, (user(casual(rng, rng.choice(COPY)).format(x=text)), assistant(text)))


def reverse(rng: random.Random, split: Split) -> Sample:
    """Say a short text from back to front."""
    key, kind, _, items, separator = _draw(rng, split, "reverse", 8)
    question = casual(rng, rng.choice(REVERSE)).format(x=separator.join(items), k=kind)
    return Sample("reversing", key, (user(question), assistant(separator.join(reversed(items)))))


def count(rng: random.Random, split: Split) -> Sample:
    """Count all items of a text, or one of them, by numbering them aloud."""
    if rng.random() < 0.5:
        return _count_one(rng, split)
    key, kind, item, items, separator = _draw(rng, split, "count", 10)
    question = casual(rng, rng.choice(COUNT)).format(x=separator.join(items), k=kind, i=item)
    numbered = ", ".join(f"{x} {n}" for n, x in enumerate(items, 1))
    return Sample("counting", key, (user(question), assistant(f"{numbered}. There are {len(items)} {item}s.")))


def _count_one(rng: random.Random, split: Split) -> Sample:
    while True:
        pool = rng.sample(rng.choice((string.ascii_uppercase, string.ascii_lowercase, string.digits)), k=4)
        separator = " " if pool[0].islower() else rng.choice(("", " "))
        wanted, items = pool[0], rng.choices(pool, weights=(3, 1, 1, 1), k=rng.randint(3, 9))
        key = f"count:{wanted}:{separator.join(items)}"
        if split_of(key) == split:
            break
    question = casual(rng, rng.choice(COUNT_ONE)).format(c=wanted, x=separator.join(items))
    total, parts = 0, []
    for x in items:
        total += x == wanted
        parts.append(f"{x} {total}")
    times = f"{total} time{'' if total == 1 else 's'}"
    answer = assistant(f"{', '.join(parts)}. {wanted} appears {times}.")
    return Sample("counting one kind", key, (user(question), answer))


def sort(rng: random.Random, split: Split) -> Sample:
    """Sort numbers, letters or words; numbers also downwards."""
    while True:
        form = rng.randrange(4)
        if form <= 1:
            top = 10 ** rng.choice((1, 2, 2, 3))
            values = rng.sample(range(top), k=rng.randint(3, 6 if top < 1000 else 5))
            items, kind, item, separator = [str(v) for v in values], "list", "number", rng.choice((", ", " "))
        elif form == 2:
            pool = rng.choice((string.ascii_lowercase, string.ascii_uppercase))
            items, kind, item = rng.sample(pool, k=rng.randint(3, 7)), "list", "letter"
            separator = " " if pool[0] == "a" else rng.choice(("", " "))
        else:
            firsts = {word[0]: word for word in rng.sample(NOUNS, k=rng.randint(3, 8))}
            items, kind, item, separator = list(firsts.values())[:5], "list", "word", ", "
        key = f"sort:{separator.join(items)}"
        if split_of(key) == split:
            break
    down = item == "number" and rng.random() < 0.3
    pool = SORT_DOWN if down else SORT if item == "number" else SORT[:5]
    question = casual(rng, rng.choice(pool)).format(x=separator.join(items), k=kind, i=item)
    ordered = sorted(items, key=int if item == "number" else str, reverse=down)
    return Sample("sorting", key, (user(question), assistant(separator.join(ordered))))
