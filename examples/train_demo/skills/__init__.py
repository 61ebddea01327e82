"""The skills of the demo model by name: each a seeded generator ``(rng, split) -> Sample``."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import about, arithmetic, faq, recall, scope, stories, strings, structured, tools
from .base import Message, Sample, Split, assistant, split_of, user

Generator = Callable[[random.Random, Split], Sample]

__all__ = ["SKILLS", "Generator", "Message", "Sample", "Split", "assistant", "split_of", "user"]


def _filler(rng: random.Random, split: Split) -> list[Message]:
    pick = rng.choice((arithmetic.compare, strings.copy, strings.reverse, faq.ask, scope.beyond, arithmetic.plain))
    return list(pick(rng, split).messages[:2])


def _recall(rng: random.Random, split: Split) -> Sample:
    fillers = rng.choice((0, 1, 1, 2))
    return recall.recall(rng, split, _filler if fillers else None, fillers)


SKILLS: dict[str, Generator] = {
    "copy": strings.copy,
    "reverse": strings.reverse,
    "count": strings.count,
    "sort": strings.sort,
    "arithmetic": arithmetic.plain,
    "arithmetic_thinking": arithmetic.thinking,
    "compare": arithmetic.compare,
    "json": structured.extract,
    "tool_call": tools.call,
    "tool_answer": tools.result,
    "tool_declined": tools.declined,
    "faq": faq.ask,
    "about": about.chat,
    "scope": scope.beyond,
    "recall": _recall,
    "story": stories.story,
}
