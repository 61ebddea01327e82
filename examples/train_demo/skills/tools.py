"""Calling a tool when tools are given and one fits, and answering from what the tool returned."""

from __future__ import annotations

import json
import random
from typing import Any

from . import about, faq
from .base import Message, Sample, Split, assistant, casual, split_of, user
from .tool_uses import USES, Use


def _others(rng: random.Random, use: Use, count: int) -> list[dict[str, Any]]:
    """Further tools with other names and other topics than the one that is needed."""
    taken, tools = {use.tool["function"]["name"]}, []
    while len(tools) < count:
        other = rng.choice(USES)(rng)
        if other.topic != use.topic and other.tool["function"]["name"] not in taken:
            taken.add(other.tool["function"]["name"])
            tools.append(other.tool)
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
    sample = rng.choice((about.chat, about.chat, faq.ask))(rng, split)
    return Sample("no tool needed", sample.key, sample.messages, tools)
