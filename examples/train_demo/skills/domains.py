"""Subjects of the sentences to turn into JSON: fields with their types and values, and sentences that state them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .vocabulary import COUNTRIES, FIELDS, HOBBIES, THINGS, invented_noun
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


def _object(rng: random.Random) -> str:
    draw = rng.random()
    return invented_noun(rng) if draw < 0.1 else rng.choice(NOUNS if draw < 0.5 else THINGS)


def _title(rng: random.Random) -> str:
    return f"The {rng.choice(COLOURS).capitalize()} {rng.choice(THINGS).capitalize()}"


DOMAINS = (
    Domain(
        {"name": ("string", person), "age": ("integer", _whole(3, 99)), "city": ("string", place)},
        (
            "{name} is {age} years old and lives in {city}.",
            "{name} lives in {city} and is {age}.",
            "At {age}, {name} moved to {city}.",
            "My neighbour {name}, aged {age}, comes from {city}.",
            "In {city} lives {name}, who is {age} years old.",
            "{name} is {age} and lives in {city}.",
            "{name}, {age}, {city}",
            "My name is {name}, I am {age} and I live in {city}.",
            "I am {name} from {city}, {age} years old.",
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
            "{name} is a {job} in {city} and has {years} years of experience.",
        ),
    ),
    Domain(
        {"item": ("string", _object), "colour": ("string", _choice(COLOURS)), "count": ("integer", _whole(2, 500))},
        (
            "There are {count} {colour} pieces of the item {item} in the box.",
            "The shop ordered the {item} in {colour}, {count} pieces.",
            "We have {count} of the {colour} {item} left.",
            "Please pack {count} times the {colour} {item}.",
            "I bought {count} of the {colour} {item}.",
        ),
    ),
    Domain(
        {"product": ("string", _object), "price": ("number", _price), "count": ("integer", _whole(1, 300))},
        (
            "The {product} costs {price} and there are {count} in stock.",
            "We sold {count} units of the {product} at {price} each.",
            "One {product} is {price}; we keep {count} of them.",
            "A {product} for {price}, {count} in stock.",
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
            "Let us have the {title} in {city} on {day} at {time}.",
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
    Domain(
        {"title": ("string", _title), "author": ("string", person), "year": ("integer", _whole(1800, 2030))},
        (
            "{title} was written by {author} in {year}.",
            "In {year} {author} wrote {title}.",
            "I am reading {title} by {author}, from {year}.",
        ),
    ),
    Domain(
        {"name": ("string", person), "country": ("string", _choice(COUNTRIES)), "likes": ("string", _choice(HOBBIES))},
        (
            "{name} comes from {country} and likes {likes}.",
            "{name} from {country} loves {likes}.",
            "In {country} lives {name}, who enjoys {likes}.",
        ),
    ),
    Domain(
        {
            "student": ("string", person),
            "subject": ("string", _choice([field for field in FIELDS if " " not in field])),
            "grade": ("integer", _whole(1, 100)),
        },
        (
            "{student} got {grade} points in {subject}.",
            "In {subject}, {student} has the grade {grade}.",
            "The grade of {student} in {subject} is {grade}.",
        ),
    ),
    Domain(
        {"customer": ("string", person), "product": ("string", _object), "quantity": ("integer", _whole(1, 99))},
        (
            "{customer} ordered {quantity} pieces of the {product}.",
            "{customer} wants to buy {quantity} times the {product}.",
            "Order from {customer}: {quantity} x {product}",
        ),
    ),
)

# Fields of any kind, stated one by one: so that keys are read from the request rather than known by heart.
LOOSE: dict[str, tuple[str, Value]] = {
    **dict.fromkeys(("owner", "author", "driver", "winner", "teacher", "friend", "boss", "sender"), ("string", person)),
    **dict.fromkeys(("origin", "location", "home", "address", "destination", "team"), ("string", place)),
    **dict.fromkeys(("item", "gift", "tool", "material", "type", "category", "label"), ("string", _object)),
    **{key: ("string", _choice(COLOURS)) for key in ("colour", "color")},
    **{
        key: ("integer", _whole(0, 999))
        for key in ("weight", "height", "size", "score", "level", "speed", "total", "number", "id", "room", "length")
    },
    **dict.fromkeys(("cost", "rate", "fee", "discount"), ("number", _price)),
    "day": ("string", _choice(DAYS)),
    "hobby": ("string", _choice(HOBBIES)),
}


def loose_domain(rng: random.Random) -> Domain:
    """Two to four unrelated fields and one sentence that states each of them."""
    keys = rng.sample(sorted(LOOSE), k=rng.randint(2, 4))
    form = rng.choice(("the {k} is {{{k}}}", "its {k} is {{{k}}}", "{k}: {{{k}}}", "{k} {{{k}}}"))
    parts = [form.replace("{k}", key).replace("{{", "{").replace("}}", "}") for key in keys]
    joined = ", ".join(parts) if ":" in form or rng.random() < 0.5 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return Domain({key: LOOSE[key] for key in keys}, (f"{joined[0].upper()}{joined[1:]}{'' if ':' in form else '.'}",))
