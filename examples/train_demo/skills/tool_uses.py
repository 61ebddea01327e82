"""Tools and the needs that they meet: definition, question, arguments, result and the final answer in words.

Most tools are built from a verb and a noun, so that the model learns to read definitions rather than to know a
list of tools by heart.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .tool_actions import ACTIONS, FILLS, any_word
from .vocabulary import THINGS
from .words import DAYS, NOUNS, article, listed, number, person, place


@dataclass(frozen=True)
class Use:
    """One tool with one way to need it; tools of one ``topic`` could serve the same need."""

    topic: str

    tool: dict[str, Any]
    question: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str

    @property
    def name(self) -> str:
        """The tool's name."""
        return str(self.tool["function"]["name"])


def define(
    name: str, description: str, parameters: dict[str, Any], optional: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A tool definition as OpenAI clients send it: all ``parameters`` are required but those in ``optional``."""
    required = list(parameters)
    parameters = {**parameters, **(optional or {})}
    schema = {"type": "object", "properties": parameters, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _typed(rng: random.Random, kind: str, description: str) -> dict[str, Any]:
    """A parameter's schema, with a description now and then, as real definitions have it."""
    if rng.random() < 0.7:
        return {"type": kind}
    return {"type": kind, "description": rng.choice((description, f"{description}.", f"{description}, for example"))}


def _weather(rng: random.Random) -> Use:
    city, sky, degrees = place(rng), rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy")), rng.randint(-9, 38)
    key = rng.choice(("city", "location", "place", "town"))
    name = rng.choice(
        ("get_weather", "weather", "get_current_weather", "current_weather", "fetch_weather", "weather_lookup")
    )
    description = rng.choice(
        (
            "Get the weather of a city",
            "Current weather",
            "Get the current weather",
            "Get current temperature for a given location.",
            "Get the current weather in a given location",
            "Returns the weather",
        )
    )
    unit = {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}
    tool = define(name, description, {key: _typed(rng, "string", f"The {key}")}, unit if rng.random() < 0.2 else None)
    question = rng.choice(
        (
            "What is the weather in {c}?",
            "How is the weather in {c} today?",
            "Is it raining in {c}?",
            "Tell me the weather in {c}.",
            "What's the weather like in {c}?",
            "Weather in {c}?",
            "How is the weather in {c}?",
            "What is the weather like in {c}?",
            "What is the weather like in {c} today?",
            "What is the temperature in {c}?",
            "How warm is it in {c}?",
            "Is it cold in {c}?",
            "Is it sunny in {c} right now?",
            "Do I need an umbrella in {c}?",
            "Can you check the weather in {c}?",
            "I am going to {c}, how is the weather?",
            "weather {c}",
        )
    )
    degrees_key = rng.choice(("temperature", "degrees"))
    result = {degrees_key: degrees, "sky": sky}
    answer = f"It is {sky} in {city}, with {degrees} degrees."
    return Use("weather", tool, question.format(c=city), {key: city}, result, answer)


def _calculator(rng: random.Random) -> Use:
    a, b = rng.randint(2, 9999), rng.randint(2, 9999)
    op, word = rng.choice((("+", "plus"), ("-", "minus"), ("*", "times")))
    value = {"+": a + b, "-": a - b, "*": a * b}[op]
    name = rng.choice(("calculator", "calculate", "evaluate"))
    tool = define(name, "Evaluate an arithmetic expression", {"expression": {"type": "string"}})
    question = rng.choice(
        (
            "What is {a} {w} {b}?",
            "Compute {a} {o} {b}.",
            "Use the tool: {a} {o} {b}?",
            "Calculate {a} {o} {b}",
            "{a} {o} {b}?",
        )
    )
    text = question.format(a=a, b=b, w=word, o=op)
    return Use("sum", tool, text, {"expression": f"{a} {op} {b}"}, {"result": value}, f"{a} {op} {b} = {value}")


def _time(rng: random.Random) -> Use:
    city, clock = place(rng), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    key = rng.choice(("city", "place", "location", "timezone_city"))
    name = rng.choice(("get_time", "current_time", "get_current_time", "clock", "local_time"))
    tool = define(name, "Get the local time of a city", {key: _typed(rng, "string", f"The {key}")})
    question = rng.choice(
        (
            "What time is it in {c}?",
            "Tell me the time in {c}.",
            "How late is it in {c}?",
            "What's the time in {c} now?",
            "Time in {c}?",
            "What is the current time in {c}?",
        )
    )
    return Use("time", tool, question.format(c=city), {key: city}, {"time": clock}, f"It is {clock} in {city}.")


def _timer(rng: random.Random) -> Use:
    minutes = rng.randint(1, 120)
    tool = define(rng.choice(("set_timer", "start_timer")), "Start a timer", {"minutes": {"type": "integer"}})
    question = rng.choice(
        (
            "Set a timer for {m} minutes.",
            "Start a timer of {m} minutes.",
            "Timer: {m} minutes",
            "I need a timer of {m} minutes.",
            "Wake me in {m} minutes.",
        )
    )
    return Use(
        "timer",
        tool,
        question.format(m=minutes),
        {"minutes": minutes},
        {"status": "started"},
        f"The timer of {minutes} minutes is started.",
    )


def _message(rng: random.Random) -> Use:
    name, noun, day = person(rng), rng.choice(NOUNS + THINGS), rng.choice(DAYS)
    text = rng.choice((f"bring the {noun} on {day}", f"the {noun} is ready", f"see you on {day}"))
    tool = define(
        rng.choice(("send_message", "send_text")),
        "Send a message to a person",
        {"to": {"type": "string"}, "text": {"type": "string"}},
    )
    question = rng.choice(
        (
            "Send {n} this message: {t}",
            "Write to {n}: {t}",
            "Tell {n} by message: {t}",
            "Message {n}: {t}",
            "Text {n}: {t}",
        )
    )
    return Use(
        "message",
        tool,
        question.format(n=name, t=text),
        {"to": name, "text": text},
        {"status": "sent"},
        f"The message to {name} is sent.",
    )


LOOKUPS = listed(
    "price stock weight rating status height distance balance population size age level speed length "
    "value score cost owner address depth width volume rank history location date salary total limit "
    "battery mood"
)
SUBJECTS = listed(
    "item product order account city person user package book friend customer invoice ticket device animal "
    "plant machine room student employee patient town village player team file ship car shop toy"
)
VERBS = listed("get find check read fetch lookup show query load search")
NUMBERED = ("order", "account", "package", "invoice", "ticket", "room", "device")
PEOPLE = ("person", "user", "friend", "customer", "student", "employee", "patient", "player")


def _subject(rng: random.Random, kind: str) -> tuple[str, Any, str]:
    """(JSON type, value, words) of something to look up."""
    if kind in NUMBERED:
        value = rng.randint(1, 99999)
        return "integer", value, f"{kind} {value}"
    if kind in ("city", "town", "village"):
        text = place(rng)
    elif kind in PEOPLE:
        text = person(rng)
    else:
        text = any_word(rng)
        return "string", text, f"the {kind} {text}"
    return "string", text, text


def _lookup(rng: random.Random) -> Use:
    what, kind = rng.choice(LOOKUPS), rng.choice(SUBJECTS)
    kind_type, value, words = _subject(rng, kind)
    verb = rng.choice(VERBS)
    key = rng.choice(
        (kind, kind, f"{kind}_id", "id") if kind_type == "integer" else (kind, kind, f"{kind}_name", "query")
    )
    tool = define(
        rng.choice((f"{verb}_{what}", f"{kind}_{what}", f"{verb}_{kind}_{what}", f"{what}_of_{kind}")),
        f"{verb.capitalize()} the {what} of {article(kind)}",
        {key: _typed(rng, kind_type, f"The {kind}")},
    )
    question = rng.choice(
        (
            "What is the {w} of {x}?",
            "Tell me the {w} of {x}.",
            "I need the {w} of {x}.",
            "Find the {w} of {x}.",
            "Can you check the {w} of {x}?",
            "What's the {w} of {x}?",
            "Show me the {w} of {x}.",
            "Look up the {w} of {x}.",
            "Please find out the {w} of {x}.",
            "Do you know the {w} of {x}?",
            "Give me the {w} of {x}.",
            "I want to know the {w} of {x}.",
            "{w} of {x}?",
        )
    )
    found: Any = number(rng, 4) if what != "status" else rng.choice(("open", "closed", "shipped", "ready", "lost"))
    return Use(
        what, tool, question.format(w=what, x=words), {key: value}, {what: found}, f"The {what} of {words} is {found}."
    )


def _action(rng: random.Random) -> Use:
    names, description, slots, questions, answer = rng.choice(ACTIONS)
    values = {key: FILLS[kind](rng) for key, kind in slots.items()}
    parameters = {
        key: _typed(rng, "integer" if isinstance(value, int) else "string", f"The {key}")
        for key, value in values.items()
    }
    said = answer.format(**values)
    return Use(
        description,
        define(rng.choice(names.split()), description, parameters),
        rng.choice(questions).format(**values),
        values,
        {"status": rng.choice(("ok", "done"))},
        f"{said[0].upper()}{said[1:]}",
    )


USES: tuple[Callable[[random.Random], Use], ...] = (
    _weather,
    _calculator,
    _time,
    _timer,
    _message,
    _weather,
    _action,
    _action,
    _action,
    _lookup,
    _lookup,
    _lookup,
    _lookup,
    _lookup,
)
