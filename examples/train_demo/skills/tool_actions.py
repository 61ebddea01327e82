"""Simple actions that tools do: names, description, parameters with their kinds, wordings of the need, and answer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from .vocabulary import FIELDS, LANGUAGES, THINGS, invented_noun
from .words import COLOURS, DAYS, NOUNS, person, place


def any_word(rng: random.Random) -> str:
    """A noun in small letters, known or invented."""
    draw = rng.random()
    return invented_noun(rng) if draw < 0.15 else rng.choice(NOUNS if draw < 0.5 else THINGS)


ACTIONS: tuple[tuple[str, str, dict[str, str], tuple[str, ...], str], ...] = (
    (
        "play_song play_music start_song",
        "Play a song",
        {"title": "word"},
        ("Play the song {title}.", "Put on {title}.", "I want to hear {title}."),
        "Now playing {title}.",
    ),
    (
        "add_to_list add_item shopping_add",
        "Add an item to the shopping list",
        {"item": "word", "count": "count"},
        (
            "Add {count} {item} to my list.",
            "Put {count} {item} on the shopping list.",
            "I need {count} {item}, add it.",
        ),
        "I put {count} {item} on the list.",
    ),
    (
        "turn_on switch_on light_on",
        "Turn on the light of a room",
        {"room": "room"},
        ("Turn on the light in the {room}.", "Light on in the {room}.", "Switch on the {room} light."),
        "The light in the {room} is on.",
    ),
    (
        "book_train book_ticket reserve_seat",
        "Book a train ticket",
        {"from": "place", "to": "place", "day": "day"},
        ("Book a train from {from} to {to} on {day}.", "On {day} I go from {from} to {to}, book a ticket."),
        "The ticket from {from} to {to} on {day} is booked.",
    ),
    (
        "create_event add_event new_event",
        "Create a calendar event",
        {"title": "event", "day": "day"},
        ("Put {title} into my calendar on {day}.", "Create an event: {title} on {day}.", "Plan {title} for {day}."),
        "{title} on {day} is in the calendar.",
    ),
    (
        "convert exchange convert_money",
        "Convert an amount of money",
        {"amount": "count", "to": "currency"},
        ("Convert {amount} to {to}.", "How much is {amount} in {to}?", "Change {amount} into {to}."),
        "I converted {amount} to {to}.",
    ),
    (
        "search web_search search_web find_pages",
        "Search the web",
        {"query": "field"},
        (
            "Search for {query}.",
            "Find something about {query}.",
            "Look up {query} on the web.",
            "Search the web for {query}.",
        ),
        "I found pages about {query}.",
    ),
    (
        "translate translate_word translator",
        "Translate a word into a language",
        {"word": "word", "language": "language"},
        ("Translate {word} into {language}.", "What is {word} in {language}?", "How do you say {word} in {language}?"),
        "I translated {word} into {language}.",
    ),
    (
        "set_color paint_wall change_colour",
        "Set the colour of an object",
        {"object": "word", "colour": "colour"},
        ("Make the {object} {colour}.", "Paint the {object} {colour}.", "Set the {object} to {colour}."),
        "The {object} is {colour} now.",
    ),
    (
        "call_person phone call_contact",
        "Call a person",
        {"name": "person"},
        ("Call {name}.", "Phone {name} please.", "Give {name} a call."),
        "Calling {name}.",
    ),
)
FILLS: dict[str, Callable[[random.Random], Any]] = {
    "word": any_word,
    "count": lambda rng: rng.randint(2, 999),
    "room": lambda rng: rng.choice(("kitchen", "garage", "bedroom", "bathroom", "hall", "cellar", "office", "garden")),
    "place": place,
    "day": lambda rng: rng.choice(DAYS),
    "event": lambda rng: rng.choice(("dinner", "lunch", "yoga", "a meeting", "a party", "football", "shopping")),
    "currency": lambda rng: rng.choice(("euros", "dollars", "pounds", "yen", "francs")),
    "field": lambda rng: rng.choice(FIELDS),
    "language": lambda rng: rng.choice(LANGUAGES),
    "colour": lambda rng: rng.choice(COLOURS),
    "person": person,
}
