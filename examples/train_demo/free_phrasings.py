"""Requests as a new user might type them, with the content of a good reply.

No generator reads this list, though a few of its requests could be drawn word for word; it shows how far the skills
reach beyond their templates.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from skills import tool_uses

TEXT = {"type": "string"}
WEATHER = tool_uses.define(
    "get_weather",
    "Get current temperature for a given location.",
    {"location": {"type": "string", "description": "City and country e.g. Bogota, Colombia"}},
)
FLIGHTS = tool_uses.define("search_flights", "Search for flights", {"origin": TEXT, "destination": TEXT})
VOLUME = tool_uses.define("set_volume", "Set the volume of the speaker", {"level": {"type": "integer"}})
SORRY = "cannot help with that"


@dataclass(frozen=True)
class Free:
    """One conversation: the user's turns, and what the reply to the last one must hold.

    ``wanted`` is one text or several that must all occur (in any case of letters), or a dict that the reply must equal
    as JSON: with tools, the call.
    """

    turns: tuple[str, ...]
    wanted: str | tuple[str, ...] | dict[str, Any]
    tools: tuple[dict[str, Any], ...] = ()


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


FREE = (
    Free(("What is a radix cache?",), "tree keyed by their tokens"),
    Free(("explain radix caching please",), "tree keyed by their tokens"),
    Free(("how do i start the server",), "make serve"),
    Free(("yo whats tokenmill",), "inference and serving engine"),
    Free(("Could you walk me through what preemption does?",), "pages of a running request"),
    Free(("which port does it listen on by default",), "8000"),
    Free(("How do I switch off prefix caching?",), "--no-enable-prefix-caching"),
    Free(("does tokenmill work without a gpu?",), "yes"),
    Free(("How can I talk to it using the openai library?",), "localhost:8000/v1"),
    Free(("what is speculative decoding good for",), "drafter"),
    Free(("is tokenmill open source",), "Apache"),
    Free(("What does --max-num-seqs do?",), "how many requests"),
    Free(("127+345?",), "= 472"),
    Free(("what's 58 plus 67",), "= 125"),
    Free(("I have 312 apples and give away 87. How many are left?",), "= 225"),
    Free(("Is 542 bigger than 524?",), "yes"),
    Free(("subtract 19 from 400",), "= 381"),
    Free(("Who won the world cup?",), SORRY),
    Free(("What is the capital of France?",), SORRY),
    Free(("write me a python script that downloads a website",), SORRY),
    Free(("Can you translate 'good morning' to Spanish?",), SORRY),
    Free(("What's the weather like tomorrow?",), SORRY),
    Free(("How do airplanes fly?",), SORRY),
    Free(("Give me three tips for sleeping better",), SORRY),
    Free(("do you think aliens exist?",), SORRY),
    Free(("why is the ocean salty",), SORRY),
    Free(("Recommend me a movie for tonight",), SORRY),
    Free(("hey, how are you doing today?",), "I am well"),
    Free(("what can you do?",), "TokenMill demo model"),
    Free(("who are you",), "TokenMill demo model"),
    Free(("thanks a bunch!",), "welcome"),
    Free(("My name is Ada and I like tea.", "What is my name?"), "Ada"),
    Free(("Hi there, I'm Marek from Prague", "where am i from?"), "Prague"),
    Free(("call me Juno please", "What was the weather in Rome?", "do you still know my name?"), "Juno"),
    Free(("I have a dog called Biscuit", "what is my dog called?"), "Biscuit"),
    Free(("my lucky number is 4821", "what is 3 + 4?", "and my lucky number was?"), "4821"),
    Free(("I'm Ada. I work as a nurse and live in Leeds.", "What do I do for a living?"), "nurse"),
    Free(("Repeat after me: the quick brown fox",), "the quick brown fox"),
    Free(("reverse the list 4, 9, 2, 7",), "7, 2, 9, 4"),
    Free(("sort these numbers please: 42, 7, 19",), "7, 19, 42"),
    Free(("How many letters are in QWERTY?",), "6 letters"),
    Free(("Extract the name and age as JSON: Bob is 31 years old and plays the drums.",), {"name": "Bob", "age": 31}),
    Free(
        ("Give me JSON with city and country for: I moved to Lyon in France last year.",),
        {"city": "Lyon", "country": "France"},
    ),
    Free(
        ("turn this into json with keys title, author: Nora wrote The Long Winter Night.",),
        {"title": "The Long Winter Night", "author": "Nora"},
    ),
    Free(
        ('Return a JSON object {"product": string, "price": number} for: a teapot costs 12.50',),
        {"product": "teapot", "price": 12.5},
    ),
    Free(("What is the weather like in Paris today?",), _call("get_weather", location="Paris"), (WEATHER,)),
    Free(("will I need a coat in Helsinki",), _call("get_weather", location="Helsinki"), (WEATHER,)),
    Free(
        ("find flights from Oslo to Rome",),
        _call("search_flights", origin="Oslo", destination="Rome"),
        (WEATHER, FLIGHTS),
    ),
    Free(("set the volume to 40",), _call("set_volume", level=40), (VOLUME,)),
    Free(("Tell me a story about a fox and a lantern",), ("fox", "lantern")),
    Free(("write a bedtime story about a robot who loses a key",), ("robot", "key")),
    Free(("story with Sam and Lily at the beach please",), ("Sam", "Lily", "beach")),
)


def is_good(free: Free, reply: str, ended: bool) -> bool:
    """Does the reply to the last turn hold what it must, and did the model end it by itself?"""
    if not ended:
        return False
    if isinstance(free.wanted, dict):
        text = reply.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
        try:
            return bool(json.loads(text) == free.wanted)
        except ValueError:
            return False
    wanted = (free.wanted,) if isinstance(free.wanted, str) else free.wanted
    return all(text.lower() in reply.lower() for text in wanted)
