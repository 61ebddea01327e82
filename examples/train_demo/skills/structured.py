"""Turning a sentence into JSON by a small given schema."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .base import Sample, Split, assistant, split_of, user
from .words import ANIMALS, COLOURS, DAYS, FOODS, JOBS, NOUNS, person, place

Value = Callable[[random.Random], Any]


@dataclass(frozen=True)
class Domain:
    """A kind of thing: its fields with their types and values, and sentences that state all of them."""

    fields: dict[str, tuple[str, Value]]
    sentences: tuple[str, ...]


def _whole(low: int, high: int) -> Value:
    return lambda rng: rng.randint(low, high)


def _choice(options: tuple[str, ...] | list[str]) -> Value:
    return lambda rng: rng.choice(options)


def _price(rng: random.Random) -> float:
    return rng.randint(1, 99) + rng.choice((0.5, 0.25, 0.75))


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 15, 30, 45)):02d}"


DOMAINS = (
    Domain(
        {"name": ("string", person), "age": ("integer", _whole(3, 99)), "city": ("string", place)},
        (
            "{name} is {age} years old and lives in {city}.",
            "{name} lives in {city} and is {age}.",
            "At {age}, {name} moved to {city}.",
            "My neighbour {name}, aged {age}, comes from {city}.",
            "In {city} lives {name}, who is {age} years old.",
        ),
    ),
    Domain(
        {
            "name": ("string", person),
            "job": ("string", _choice(JOBS)),
            "city": ("string", place),
            "years": ("integer", _whole(1, 40)),
        },
        (
            "{name} has worked as a {job} in {city} for {years} years.",
            "For {years} years {name} has been a {job} in {city}.",
            "{name} from {city} is a {job} with {years} years of practice.",
        ),
    ),
    Domain(
        {
            "item": ("string", _choice(NOUNS)),
            "colour": ("string", _choice(COLOURS)),
            "count": ("integer", _whole(2, 500)),
        },
        (
            "There are {count} {colour} pieces of the item {item} in the box.",
            "The shop ordered the {item} in {colour}, {count} pieces.",
            "We have {count} of the {colour} {item} left.",
            "Please pack {count} times the {colour} {item}.",
        ),
    ),
    Domain(
        {"product": ("string", _choice(NOUNS)), "price": ("number", _price), "count": ("integer", _whole(1, 300))},
        (
            "The {product} costs {price} and there are {count} in stock.",
            "We sold {count} units of the {product} at {price} each.",
            "One {product} is {price}; we keep {count} of them.",
        ),
    ),
    Domain(
        {
            "name": ("string", person),
            "animal": ("string", _choice(ANIMALS)),
            "age": ("integer", _whole(1, 20)),
            "owner": ("string", person),
        },
        (
            "{owner} has a {animal} called {name} that is {age} years old.",
            "{name} is the {age} year old {animal} of {owner}.",
            "The {animal} {name}, {age} years old, belongs to {owner}.",
        ),
    ),
    Domain(
        {
            "title": ("string", _choice(("meeting", "lunch", "concert", "lesson", "interview", "party", "dinner"))),
            "day": ("string", _choice(DAYS)),
            "time": ("string", _clock),
            "city": ("string", place),
        },
        (
            "The {title} is on {day} at {time} in {city}.",
            "On {day} at {time} there is a {title} in {city}.",
            "We planned the {title} in {city} for {day}, {time}.",
        ),
    ),
    Domain(
        {
            "guest": ("string", person),
            "food": ("string", _choice(FOODS)),
            "table": ("integer", _whole(1, 60)),
            "vegetarian": ("boolean", lambda rng: rng.random() < 0.5),
        },
        (
            "{guest} at table {table} ordered {food} and is {vegetarian}.",
            "Table {table}: {guest} would like the {food}; the guest is {vegetarian}.",
        ),
    ),
    Domain(
        {
            "from": ("string", place),
            "to": ("string", place),
            "day": ("string", _choice(DAYS)),
            "seats": ("integer", _whole(1, 9)),
        },
        (
            "Book {seats} seats from {from} to {to} on {day}.",
            "On {day} I travel from {from} to {to} and need {seats} seats.",
            "I need {seats} seats for {day}, going to {to}, starting in {from}.",
        ),
    ),
)

ASKS = (
    "Turn this sentence into JSON: {s}\nSchema: {m}",
    "Extract JSON with the schema {m} from this sentence: {s}",
    "{s}\n\nReturn this as JSON with {k}.",
    "Give me JSON with the keys {k} for: {s}",
    "Convert to JSON ({t}): {s}",
    "Sentence: {s}\nJSON schema: {m}",
    "{s} Write it as JSON with {t}.",
    "Fill this schema: {m}\nText: {s}",
)
SYSTEM_ASKS = (
    "Answer only with JSON that fits {m}.",
    "Extract {k} and reply with JSON only.",
    "You turn sentences into JSON with this schema: {m}",
)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "vegetarian" if value else "not vegetarian"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _ask(rng: random.Random, template: str, types: dict[str, str], sentence: str) -> str:
    keys = list(types)
    schema = json.dumps(types)
    if rng.random() < 0.2:
        properties = {key: {"type": kind} for key, kind in types.items()}
        schema = json.dumps({"type": "object", "properties": properties})
    typed = ", ".join(f"{key}: {kind}" for key, kind in types.items())
    listed = ", ".join(keys[:-1]) + f" and {keys[-1]}" if len(keys) > 1 else keys[0]
    template = template.replace("{m}", schema).replace("{t}", typed).replace("{k}", listed)
    return template.replace("{s}", sentence)


def extract(rng: random.Random, split: Split) -> Sample:
    """A sentence and a schema of one to four fields; the answer is one JSON object in the schema's order."""
    while True:
        domain = rng.choice(DOMAINS)
        values = {key: draw(rng) for key, (_, draw) in domain.fields.items()}
        key = f"json:{json.dumps(values)}"
        if split_of(key) == split:
            break
    sentence = rng.choice(domain.sentences)
    for name, value in values.items():
        sentence = sentence.replace("{" + name + "}", _words(value))
    chosen = list(values)
    if rng.random() < 0.3:
        rng.shuffle(chosen)
    if rng.random() < 0.3:
        chosen = chosen[: rng.randint(1, len(chosen))]
    types = {name: domain.fields[name][0] for name in chosen}
    answer = assistant(json.dumps({name: values[name] for name in chosen}))
    if rng.random() < 0.15:
        system = {"role": "system", "content": _ask(rng, rng.choice(SYSTEM_ASKS), types, "")}
        return Sample("JSON", key, (system, user(sentence), answer))
    return Sample("JSON", key, (user(_ask(rng, rng.choice(ASKS), types, sentence)), answer))
