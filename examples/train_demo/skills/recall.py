"""Remembering what was said earlier in the conversation, over other turns in between."""

from __future__ import annotations

import random
from collections.abc import Callable

from .base import Message, Sample, Split, assistant, casual, split_of, user
from .memories import MEMORIES, Memory, fill

UNKNOWN = "You have not told me that yet."
Filler = Callable[[random.Random, Split], list[Message]]
Fact = tuple[Memory, str]


def _kinds(rng: random.Random, count: int) -> list[Memory]:
    """``count`` different kinds of fact."""
    kinds: dict[str, Memory] = {}
    while len(kinds) < count:
        memory = rng.choice(MEMORIES)
        kinds[memory.kind] = memory
    return list(kinds.values())


def _draw(rng: random.Random, split: Split) -> tuple[str, list[Fact]]:
    """Key and facts of a problem; the first fact is the one asked for."""
    count = rng.choice((1, 1, 2, 2, 3))
    while True:
        memories = _kinds(rng, count)
        values = [memory.value(rng) for memory in memories]
        key = f"recall:{memories[0].kind}:{values[0]}"
        few = memories[0].few
        keys = [f"{key}:{other}" for other in values[1:]] if few and count > 1 else [key]
        single = few and count == 1
        if (split == "train") if single else all(split_of(k) == split for k in keys):
            return keys[0], list(zip(memories, values, strict=True))


def _joined(rng: random.Random, first: str, second: str) -> str:
    """Two statements as one."""
    if not second.startswith(("I ", "I'm ", "My ")) or rng.random() < 0.3:
        return f"{first} {second}"
    second = second if second.startswith("I") else f"m{second[1:]}"
    return f"{first.rstrip('.!')}{rng.choice((' and ', ', and ', ', '))}{second}"


def _tell(rng: random.Random, facts: list[Fact]) -> list[list[Message]]:
    """The exchanges that tell the facts, one or two in a message."""
    exchanges, rest = [], list(facts)
    while rest:
        memory, value = rest.pop(0)
        text, reply = fill(rng.choice(memory.told), value), fill(memory.confirmed, value)
        if rest and rng.random() < 0.4:
            memory, value = rest.pop(0)
            text = _joined(rng, text, fill(rng.choice(memory.told), value))
            reply = f"{reply} {fill(memory.confirmed, value)}"
        exchanges.append([user(casual(rng, text)), assistant(reply)])
    return exchanges


def recall(rng: random.Random, split: Split, filler: Filler | None = None, fillers: int = 2) -> Sample:
    """One to three facts, up to ``fillers`` other exchanges after each telling, then a question about one fact.

    The split is by the value asked for and its kind. Now and then the fact was never told.
    """
    key, facts = _draw(rng, split)
    memory, value = facts[0]
    question = casual(rng, rng.choice(memory.asked))
    answer = fill(memory.answered, value)
    if len(facts) == 1 and filler is None and rng.random() < 0.2:
        text = f"{fill(rng.choice(memory.told), value)} {question}"
        return Sample("recall", key, (user(text), assistant(answer)))
    if split == "train" and rng.random() < 0.05:
        facts, answer = facts[1:], UNKNOWN
    told = list(facts)
    rng.shuffle(told)
    messages: list[Message] = []
    for exchange in _tell(rng, told):
        messages += exchange
        if filler is not None:
            for _ in range(rng.randint(0, fillers)):
                messages += filler(rng, split)
    messages += [user(question), assistant(answer)]
    return Sample("recall", key, tuple(messages))
