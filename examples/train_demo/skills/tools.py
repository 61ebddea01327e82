"""Calling a tool when tools are given and one fits, and answering from what the tool returned.

Most tools are built from a verb and a noun, so that the model learns to read definitions rather than to know a
list of tools by heart.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import scope
from .base import Message, Sample, Split, assistant, casual, split_of, user
from .words import DAYS, NOUNS, article, number, person, place


@dataclass(frozen=True)
class Use:
    """One tool with one way to need it: definition, question, arguments, result and final answer."""

    tool: dict[str, Any]
    question: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    answer: str


def define(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A tool definition as OpenAI clients send it."""
    schema = {"type": "object", "properties": parameters, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _weather(rng: random.Random) -> Use:
    city, sky, degrees = place(rng), rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy")), rng.randint(-9, 38)
    key = rng.choice(("city", "location", "place"))
    name = rng.choice(("get_weather", "weather", "get_current_weather", "current_weather"))
    tool = define(
        name,
        rng.choice(("Get the weather of a city", "Current weather", "Get the current weather")),
        {key: {"type": "string"}},
    )
    question = rng.choice(
        (
            "What is the weather in {c}?",
            "How is the weather in {c} today?",
            "Is it raining in {c}?",
            "Tell me the weather in {c}.",
            "What's the weather like in {c}?",
            "Weather in {c}?",
        )
    )
    degrees_key = rng.choice(("temperature", "degrees"))
    result = {degrees_key: degrees, "sky": sky}
    answer = f"It is {sky} in {city}, with {degrees} degrees."
    return Use(tool, question.format(c=city), {key: city}, result, answer)


def _calculator(rng: random.Random) -> Use:
    a, b = rng.randint(2, 9999), rng.randint(2, 9999)
    op, word = rng.choice((("+", "plus"), ("-", "minus"), ("*", "times")))
    value = {"+": a + b, "-": a - b, "*": a * b}[op]
    name = rng.choice(("calculator", "calculate", "evaluate"))
    tool = define(name, "Evaluate an arithmetic expression", {"expression": {"type": "string"}})
    question = rng.choice(("What is {a} {w} {b}?", "Compute {a} {o} {b}.", "Use the tool: {a} {o} {b}?"))
    text = question.format(a=a, b=b, w=word, o=op)
    return Use(tool, text, {"expression": f"{a} {op} {b}"}, {"result": value}, f"{a} {op} {b} = {value}")


def _time(rng: random.Random) -> Use:
    city, clock = place(rng), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    key = rng.choice(("city", "place", "location"))
    tool = define(rng.choice(("get_time", "current_time")), "Get the local time of a city", {key: {"type": "string"}})
    question = rng.choice(("What time is it in {c}?", "Tell me the time in {c}.", "How late is it in {c}?"))
    return Use(tool, question.format(c=city), {key: city}, {"time": clock}, f"It is {clock} in {city}.")


def _timer(rng: random.Random) -> Use:
    minutes = rng.randint(1, 120)
    tool = define(rng.choice(("set_timer", "start_timer")), "Start a timer", {"minutes": {"type": "integer"}})
    question = rng.choice(("Set a timer for {m} minutes.", "Start a timer of {m} minutes.", "Timer: {m} minutes"))
    return Use(
        tool,
        question.format(m=minutes),
        {"minutes": minutes},
        {"status": "started"},
        f"The timer of {minutes} minutes is started.",
    )


def _message(rng: random.Random) -> Use:
    name, noun, day = person(rng), rng.choice(NOUNS), rng.choice(DAYS)
    text = rng.choice((f"bring the {noun} on {day}", f"the {noun} is ready", f"see you on {day}"))
    tool = define(
        rng.choice(("send_message", "send_text")),
        "Send a message to a person",
        {"to": {"type": "string"}, "text": {"type": "string"}},
    )
    question = rng.choice(("Send {n} this message: {t}", "Write to {n}: {t}", "Tell {n} by message: {t}"))
    return Use(
        tool,
        question.format(n=name, t=text),
        {"to": name, "text": text},
        {"status": "sent"},
        f"The message to {name} is sent.",
    )


LOOKUPS = (
    "price",
    "stock",
    "weight",
    "rating",
    "status",
    "height",
    "distance",
    "balance",
    "population",
    "size",
    "age",
    "level",
    "speed",
    "length",
    "value",
    "score",
)
SUBJECTS = ("item", "product", "order", "account", "city", "person", "user", "package", "book", "name")


def _subject(rng: random.Random, kind: str) -> tuple[str, Any, str]:
    """(JSON type, value, words) of something to look up."""
    if kind in ("order", "account", "package"):
        value = rng.randint(1, 99999)
        return "integer", value, f"{kind} {value}"
    if kind == "city":
        text = place(rng)
    elif kind in ("person", "user", "name"):
        text = person(rng)
    else:
        text = rng.choice(NOUNS)
        return "string", text, f"the {kind} {text}"
    return "string", text, text


def _lookup(rng: random.Random) -> Use:
    what, kind = rng.choice(LOOKUPS), rng.choice(SUBJECTS)
    kind_type, value, words = _subject(rng, kind)
    verb = rng.choice(("get", "find", "check", "read", "fetch", "lookup"))
    key = rng.choice((kind, kind, f"{kind}_id")) if kind_type == "integer" else kind
    tool = define(
        rng.choice((f"{verb}_{what}", f"{kind}_{what}", f"{verb}_{kind}_{what}")),
        f"{verb.capitalize()} the {what} of {article(kind)}",
        {key: {"type": kind_type}},
    )
    question = rng.choice(
        (
            "What is the {w} of {x}?",
            "Tell me the {w} of {x}.",
            "I need the {w} of {x}.",
            "Find the {w} of {x}.",
            "Can you check the {w} of {x}?",
        )
    )
    found: Any = number(rng, 4) if what != "status" else rng.choice(("open", "closed", "shipped", "ready", "lost"))
    return Use(
        tool, question.format(w=what, x=words), {key: value}, {what: found}, f"The {what} of {words} is {found}."
    )


USES: tuple[Callable[[random.Random], Use], ...] = (
    _weather,
    _calculator,
    _time,
    _timer,
    _message,
    _lookup,
    _lookup,
    _lookup,
    _lookup,
)


def _others(rng: random.Random, use: Use, count: int) -> list[dict[str, Any]]:
    """Further tools with other names and other purposes than the one that is needed."""
    taken, tools = {use.tool["function"]["name"]}, []
    words = set(use.tool["function"]["description"].lower().split()) & set(LOOKUPS)
    while len(tools) < count:
        tool = rng.choice(USES)(rng).tool["function"]
        about = set(tool["description"].lower().split())
        if (
            tool["name"] not in taken
            and not (words & about)
            and tool["description"][:12] != use.tool["function"]["description"][:12]
        ):
            taken.add(tool["name"])
            tools.append({"type": "function", "function": tool})
    return tools


def call_message(name: str, arguments: dict[str, Any]) -> Message:
    """An assistant message that is one tool call."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def _draw(rng: random.Random, split: Split) -> tuple[str, Use, tuple[dict[str, Any], ...]]:
    while True:
        use = rng.choice(USES)(rng)
        key = f"tool:{use.question}"
        if split_of(key) == split:
            break
    tools = [use.tool, *_others(rng, use, rng.choice((0, 0, 1, 1, 2)))]
    rng.shuffle(tools)
    return key, use, tuple(tools)


def call(rng: random.Random, split: Split) -> Sample:
    """A question that one of the given tools answers: the answer is the call."""
    key, use, tools = _draw(rng, split)
    answer = call_message(use.tool["function"]["name"], use.arguments)
    return Sample("tool calls", key, (user(casual(rng, use.question)), answer), tools)


def result(rng: random.Random, split: Split) -> Sample:
    """The whole way: question, call, the tool's answer, and the final answer in words."""
    key, use, tools = _draw(rng, split)
    messages = (
        user(casual(rng, use.question)),
        call_message(use.tool["function"]["name"], use.arguments),
        {"role": "tool", "content": json.dumps(use.result)},
        assistant(use.answer),
    )
    return Sample("tool answers", key, messages, tools)


def declined(rng: random.Random, split: Split) -> Sample:
    """Tools are given, but the question needs none of them."""
    _, _, tools = _draw(rng, split)
    sample = scope.chat(rng, split)
    return Sample("no tool needed", sample.key, sample.messages, tools)
