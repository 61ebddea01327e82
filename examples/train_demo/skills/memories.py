"""The kinds of fact that people tell about themselves: how each is told, confirmed, asked for and answered."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .vocabulary import COUNTRIES, HOBBIES
from .words import ANIMALS, COLOURS, FOODS, JOBS, article, person, place


@dataclass(frozen=True)
class Memory:
    """One kind of fact: how it is told, confirmed, asked for and answered (``{v}`` is its value).

    ``few`` says that it has too few values to hold any of them out.
    """

    kind: str
    value: Callable[[random.Random], str]
    told: tuple[str, ...]
    confirmed: str
    asked: tuple[str, ...]
    answered: str
    few: bool = False


def _code(rng: random.Random) -> str:
    return str(rng.randint(10, 99999))


def _choice(options: list[str]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(options)


NAME = Memory(
    "name",
    person,
    (
        "My name is {v}.",
        "My name's {v}.",
        "I am {v}.",
        "I'm {v}.",
        "I'm {v}, nice to meet you.",
        "Hello, my name is {v}.",
        "Call me {v}.",
        "You can call me {v}.",
        "Hi, I am {v}.",
        "Hi, I'm {v}!",
        "People call me {v}.",
        "I am called {v}.",
        "This is {v}.",
        "The name is {v}.",
        "Hey, {v} here.",
        "Let me introduce myself: I am {v}.",
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
        "Do you know my name?",
        "Do you know who I am?",
        "What am I called?",
        "So what is my name?",
        "Can you tell me my name?",
        "What did I say my name was?",
        "Say my name.",
        "My name?",
    ),
    "Your name is {v}.",
)
NUMBER = Memory(
    "number",
    _code,
    (
        "Remember the number {v}.",
        "My lucky number is {v}.",
        "The number is {v}.",
        "Keep the number {v} in mind.",
        "Please remember this number: {v}",
        "My favourite number is {v}.",
        "My number is {v}.",
        "Remember {v}.",
        "Do not forget the number {v}.",
    ),
    "I will remember the number {v}.",
    (
        "What was the number?",
        "Which number did I tell you?",
        "What is my lucky number?",
        "What number was it?",
        "Do you remember the number?",
        "Tell me the number again.",
        "What is my number?",
        "What's my favourite number?",
        "What number did I ask you to remember?",
    ),
    "The number is {v}.",
)
CODE = Memory(
    "code",
    _code,
    (
        "My locker code is {v}.",
        "The code for the door is {v}.",
        "The code is {v}.",
        "Remember the code {v}.",
        "Note this code: {v}",
        "My code is {v}.",
        "The secret code is {v}.",
        "My door code is {v}.",
    ),
    "I will remember the code {v}.",
    (
        "What is the code?",
        "What was my locker code?",
        "Which code did I give you?",
        "Tell me the code.",
        "Do you remember the code?",
        "What is my code?",
        "What was the secret code?",
        "What's the code for the door?",
    ),
    "The code is {v}.",
)
CITY = Memory(
    "city",
    lambda rng: rng.choice(COUNTRIES) if rng.random() < 0.2 else place(rng),
    (
        "I live in {v}.",
        "My home is {v}.",
        "I come from {v}.",
        "I am from the city of {v}.",
        "I am from {v}.",
        "I'm from {v}.",
        "My city is {v}.",
        "I live in the city of {v}.",
    ),
    "I will remember that you live in {v}.",
    (
        "Where do I live?",
        "What city do I live in?",
        "Where am I from?",
        "Do you know where I live?",
        "Which city is my home?",
        "Where is my home?",
        "Where do I come from?",
        "Do you remember where I live?",
    ),
    "You live in {v}.",
)
COLOUR = Memory(
    "colour",
    _choice(COLOURS),
    (
        "My favourite colour is {v}.",
        "My favorite color is {v}.",
        "I like the colour {v} best.",
        "The colour I love is {v}.",
        "The color I like most is {v}.",
    ),
    "I will remember that you like {v}.",
    (
        "What is my favourite colour?",
        "What is my favorite color?",
        "What's my favorite color?",
        "Which colour do I like?",
        "What colour do I like best?",
        "Do you remember my favourite colour?",
    ),
    "Your favourite colour is {v}.",
    few=True,
)
PET = Memory(
    "pet",
    lambda rng: f"{person(rng)} the {rng.choice(ANIMALS)}",
    ("My pet is {v}.", "I have a pet: {v}.", "At home waits my pet, {v}.", "I have a pet called {v}."),
    "I will remember {v}.",
    ("Who is my pet?", "What pet do I have?", "Do you remember my pet?", "Tell me about my pet.", "What is my pet?"),
    "Your pet is {v}.",
)
FOOD = Memory(
    "food",
    _choice(FOODS),
    (
        "My favourite food is {v}.",
        "My favorite food is {v}.",
        "I love to eat {v}.",
        "I like to eat {v}.",
        "The food I like most is {v}.",
    ),
    "I will remember that you like to eat {v}.",
    (
        "What is my favourite food?",
        "What is my favorite food?",
        "What do I like to eat?",
        "Which food do I love?",
        "Do you remember my favourite food?",
        "What food do I like?",
    ),
    "Your favourite food is {v}.",
    few=True,
)
JOB = Memory(
    "job",
    _choice(JOBS),
    ("I work as a {v}.", "My job is {v}.", "I am a {v} by trade.", "I am a {v}.", "I'm a {v}."),
    "I will remember that you are a {v}.",
    (
        "What is my job?",
        "What do I do for work?",
        "What is my trade?",
        "Do you remember my job?",
        "What's my job?",
        "What do I work as?",
    ),
    "You are a {v}.",
    few=True,
)
AGE = Memory(
    "age",
    lambda rng: str(rng.randint(4, 99)),
    ("I am {v} years old.", "I'm {v}.", "I am {v}.", "My age is {v}.", "I'm {v} years old.", "I turned {v} today."),
    "I will remember that you are {v} years old.",
    ("How old am I?", "What is my age?", "Do you know how old I am?", "Do you remember my age?", "What's my age?"),
    "You are {v} years old.",
    few=True,
)
LIKING = Memory(
    "liking",
    _choice(HOBBIES),
    ("I like {v}.", "I love {v}.", "I really like {v}.", "I enjoy {v}.", "I am fond of {v}.", "I'm into {v}."),
    "I will remember that you like {v}.",
    (
        "What do I like?",
        "What do I love?",
        "What do I enjoy?",
        "Do you remember what I like?",
        "Do you know what I like?",
        "What did I say I like?",
        "Tell me what I like.",
    ),
    "You like {v}.",
    few=True,
)
THING = Memory(
    "drives",
    lambda rng: f"{rng.choice(COLOURS)} {rng.choice(('car', 'bike', 'bus', 'van', 'boat', 'truck', 'scooter'))}",
    ("I drive {a}.", "I have {a}.", "I bought {a}.", "I own {a}."),
    "I will remember that you have {a}.",
    ("What do I drive?", "What do I have?", "What did I buy?", "What do I own?", "Do you remember what I have?"),
    "You have {a}.",
    few=True,
)
MEMORIES = (NAME, NAME, NUMBER, CODE, CITY, COLOUR, PET, FOOD, JOB, AGE, LIKING, LIKING, THING)


def fill(template: str, value: str) -> str:
    """The wording with its value; ``{a}`` is the value with its article."""
    return template.replace("{v}", value).replace("{a}", article(value))
