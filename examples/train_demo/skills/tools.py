"""Calling a tool when tools are given and one fits, and answering from what the tool returned."""

from __future__ import annotations

import json
import random
from typing import Any

from . import about, faq
from .base import Message, Sample, Split, assistant, casual, split_of, user
from .tool_uses import USES, Use


def call_message(name: str, arguments: dict[str, Any]) -> Message:
    """An assistant message that is one tool call."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def _use(rng: random.Random, split: Split) -> Use:
    while True:
        use = rng.choice(USES)(rng)
        if split_of(f"tool:{use.question}") == split:
            return use


def _draw(rng: random.Random, split: Split) -> tuple[str, list[Use], tuple[dict[str, Any], ...]]:
    """A key, the use it stands for before uses of other names and topics, and all their tools in any order."""
    uses = [_use(rng, split)]
    wanted = 1 + rng.choice((0, 0, 1, 1, 2))
    while len(uses) < wanted:
        other = _use(rng, split)
        if all(other.topic != use.topic and other.name != use.name for use in uses):
            uses.append(other)
    tools = [use.tool for use in uses]
    rng.shuffle(tools)
    return f"tool:{uses[0].question}", uses, tuple(tools)


def _called(rng: random.Random, use: Use) -> list[Message]:
    return [user(casual(rng, use.question)), call_message(use.name, use.arguments)]


def _answered(rng: random.Random, use: Use) -> list[Message]:
    return [*_called(rng, use), {"role": "tool", "content": json.dumps(use.result)}, assistant(use.answer)]


def _earlier(rng: random.Random, split: Split, uses: list[Use]) -> list[Message]:
    """In training, often the other tools are used first: more to learn from one reading of the definitions."""
    if split == "heldout" or rng.random() < 0.3:
        return []
    return [message for use in uses[1:] for message in _answered(rng, use)]


def call(rng: random.Random, split: Split) -> Sample:
    """A question that one of the given tools answers: the answer is the call."""
    key, uses, tools = _draw(rng, split)
    return Sample("tool calls", key, (*_earlier(rng, split, uses), *_called(rng, uses[0])), tools)


def result(rng: random.Random, split: Split) -> Sample:
    """The whole way: question, call, the tool's answer, and the final answer in words."""
    key, uses, tools = _draw(rng, split)
    return Sample("tool answers", key, (*_earlier(rng, split, uses), *_answered(rng, uses[0])), tools)


def declined(rng: random.Random, split: Split) -> Sample:
    """Tools are given, but the question needs none of them."""
    _, _, tools = _draw(rng, split)
    sample = rng.choice((about.chat, about.chat, faq.ask))(rng, split)
    return Sample("no tool needed", sample.key, sample.messages, tools)
