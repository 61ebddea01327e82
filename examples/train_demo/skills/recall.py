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


def many_recalls(rng: random.Random, split: Split, filler: Filler, characters: int) -> Sample:
    """A chat of about ``characters`` characters that tells several facts and asks each back later, in any order.

    One long row teaches many recalls over all distances, where ``recall`` teaches one.
    """
    facts = _many_facts(rng, split, rng.randint(2, 6))
    exchanges: list[list[Message]] = []
    while sum(len(m["content"]) + 30 for exchange in exchanges for m in exchange) < characters:
        exchanges.append(filler(rng, split))
    places: list[tuple[float, list[Message]]] = [(rng.random(), exchange) for exchange in exchanges]
    for memory, value in facts:
        told = rng.random() ** 2  # early more often: the long distances are the hard ones
        statement = [user(casual(rng, fill(rng.choice(memory.told), value))), assistant(fill(memory.confirmed, value))]
        places.append((told, statement))
        for asked in (rng.uniform(told, 1), 1 + rng.random())[: rng.randint(1, 2)]:
            question = [user(casual(rng, rng.choice(memory.asked))), assistant(fill(memory.answered, value))]
            places.append((asked, question))
    places.sort(key=lambda place: place[0])
    messages = [message for _, exchange in places for message in exchange]
    return Sample("recall", f"recalls:{facts[0][0].kind}:{facts[0][1]}", tuple(messages))


def _many_facts(rng: random.Random, split: Split, count: int) -> list[Fact]:
    """Up to ``count`` facts of different kinds, each of the split (those of few values are left out: they pair up)."""
    while True:
        facts = [(memory, memory.value(rng)) for memory in _kinds(rng, count) if not memory.few]
        facts = [(m, value) for m, value in facts if split_of(f"recall:{m.kind}:{value}") == split]
        if facts:
            return facts
