"""Remembering what was said earlier in the conversation, over other turns in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .base import Message, Sample, Split, assistant, casual, split_of, user
from .words import ANIMALS, COLOURS, FOODS, JOBS, person, place


@dataclass(frozen=True)
class Memory:
    """One kind of fact: how it is told, confirmed, asked for and answered (``{v}`` is its value)."""

    kind: str
    value: Callable[[random.Random], str]
    told: tuple[str, ...]
    confirmed: str
    asked: tuple[str, ...]
    answered: str


def _code(rng: random.Random) -> str:
    return str(rng.randint(10, 99999))


def _choice(options: list[str]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(options)


MEMORIES = (
    Memory(
        "name",
        person,
        (
            "My name is {v}.",
            "I am {v}.",
            "I'm {v}, nice to meet you.",
            "Hello, my name is {v}.",
            "Call me {v}.",
            "Hi, I am {v}.",
            "People call me {v}.",
        ),
        "Nice to meet you, {v}.",
        (
            "What is my name?",
            "Who am I?",
            "Do you remember my name?",
            "What was my name?",
            "Tell me my name.",
            "What's my name?",
            "Which name did I give you?",
        ),
        "Your name is {v}.",
    ),
    Memory(
        "number",
        _code,
        (
            "Remember the number {v}.",
            "My lucky number is {v}.",
            "The number is {v}.",
            "Keep the number {v} in mind.",
            "Please remember this number: {v}",
        ),
        "I will remember the number {v}.",
        (
            "What was the number?",
            "Which number did I tell you?",
            "What is my lucky number?",
            "What number was it?",
            "Do you remember the number?",
            "Tell me the number again.",
        ),
        "The number is {v}.",
    ),
    Memory(
        "code",
        _code,
        (
            "My locker code is {v}.",
            "The code for the door is {v}.",
            "The code is {v}.",
            "Remember the code {v}.",
            "Note this code: {v}",
        ),
        "I will remember the code {v}.",
        (
            "What is the code?",
            "What was my locker code?",
            "Which code did I give you?",
            "Tell me the code.",
            "Do you remember the code?",
        ),
        "The code is {v}.",
    ),
    Memory(
        "city",
        place,
        ("I live in {v}.", "My home is {v}.", "I come from {v}.", "I am from the city of {v}."),
        "I will remember that you live in {v}.",
        (
            "Where do I live?",
            "What city do I live in?",
            "Where am I from?",
            "Do you know where I live?",
            "Which city is my home?",
        ),
        "You live in {v}.",
    ),
    Memory(
        "colour",
        _choice(COLOURS),
        ("My favourite colour is {v}.", "I like the colour {v} best.", "The colour I love is {v}."),
        "I will remember that you like {v}.",
        (
            "What is my favourite colour?",
            "Which colour do I like?",
            "What colour do I like best?",
            "Do you remember my favourite colour?",
        ),
        "Your favourite colour is {v}.",
    ),
    Memory(
        "pet",
        lambda rng: f"{person(rng)} the {rng.choice(ANIMALS)}",
        ("My pet is {v}.", "I have a pet: {v}.", "At home waits my pet, {v}."),
        "I will remember {v}.",
        ("Who is my pet?", "What pet do I have?", "Do you remember my pet?", "Tell me about my pet."),
        "Your pet is {v}.",
    ),
    Memory(
        "food",
        _choice(FOODS),
        ("My favourite food is {v}.", "I love to eat {v}.", "The food I like most is {v}."),
        "I will remember that you like to eat {v}.",
        (
            "What is my favourite food?",
            "What do I like to eat?",
            "Which food do I love?",
            "Do you remember my favourite food?",
        ),
        "Your favourite food is {v}.",
    ),
    Memory(
        "job",
        _choice(JOBS),
        ("I work as a {v}.", "My job is {v}.", "I am a {v} by trade."),
        "I will remember that you are a {v}.",
        ("What is my job?", "What do I do for work?", "What is my trade?", "Do you remember my job?"),
        "You are a {v}.",
    ),
)

Filler = Callable[[random.Random, Split], list[Message]]


def recall(rng: random.Random, split: Split, filler: Filler | None = None, fillers: int = 2) -> Sample:
    """One to three facts, up to ``fillers`` other exchanges after each, then a question about one fact.

    The split is by the value asked for and its kind. Now and then the fact was never told.
    """
    memories = rng.sample(MEMORIES, k=rng.choice((1, 1, 2, 2, 3)))
    while True:
        values = [memory.value(rng) for memory in memories]
        key = f"recall:{memories[0].kind}:{values[0]}"
        short = memories[0].kind in ("colour", "food", "job")
        keys = [f"{key}:{other}" for other in values[1:]] if short and len(values) > 1 else [key]
        single = short and len(values) == 1  # a dozen colours alone are too few to hold any out
        if (split == "train") if single else all(split_of(k) == split for k in keys):
            break
        if single:
            memories = rng.sample(MEMORIES, k=2)
    told = list(zip(memories, values, strict=True))
    rng.shuffle(told)
    unknown = split == "train" and rng.random() < 0.03
    messages: list[Message] = []
    for memory, value in told:
        if unknown and memory is memories[0]:
            continue
        text = casual(rng, rng.choice(memory.told).replace("{v}", value))
        messages += [user(text), assistant(memory.confirmed.replace("{v}", value))]
        if filler is not None:
            for _ in range(rng.randint(0, fillers)):
                messages += filler(rng, split)
    answer = memories[0].answered.replace("{v}", values[0])
    if unknown:
        answer = "You have not told me that yet."
    messages += [user(casual(rng, rng.choice(memories[0].asked))), assistant(answer)]
    return Sample("recall", keys[0], tuple(messages))
