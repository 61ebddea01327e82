"""The common parts of all skills: the sample type, the train/held-out split and small helpers for wording.

A skill is a function ``generate(rng, split) -> Sample``. The last message of a sample is always the assistant's
expected answer; its ``key`` names the canonical problem, and the split is a hash of that key, so a problem can
never be in both parts, however often and in whatever wording it is drawn.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "heldout"]
Fact = tuple[str, tuple[str, ...], str]
"""(frames, subjects, answer): the frames of `faq.py` fit the kind of fact; by the subjects people ask for it."""
Message = dict[str, Any]

HELDOUT_PERCENT = 10


@dataclass(frozen=True)
class Sample:
    """One conversation that ends in the assistant's expected answer.

    ``thinking`` is the template's ``enable_thinking`` (None: not given). ``last_only`` says that earlier
    assistant turns carry no loss. ``exact`` is false where many answers are right (stories).
    """

    skill: str
    key: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool | None = None
    last_only: bool = False
    exact: bool = True
    facts: dict[str, Any] = field(default_factory=dict)


def split_of(key: str) -> Split:
    """The part that a canonical problem belongs to; about ``HELDOUT_PERCENT`` in a hundred are held out."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return "heldout" if int.from_bytes(digest, "big") % 100 < HELDOUT_PERCENT else "train"


def draw_until(split: Split, draw: Callable[[], tuple[str, Any]]) -> tuple[str, Any]:
    """Call ``draw() -> (key, problem)`` until the key falls into ``split``."""
    while True:
        key, problem = draw()
        if split_of(key) == split:
            return key, problem


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


def assistant(text: str, thought: str | None = None) -> Message:
    """An assistant message, with its thinking if there is one."""
    message: Message = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    return message


def join_words(words: list[str], last: str = "and") -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


OPENINGS = (
    "Please: ",
    "Hi! ",
    "Hello, ",
    "Hey, ",
    "OK, ",
    "Quick question: ",
    "Now, ",
    "Thanks. ",
    "And now: ",
    "Great. ",
)


def casual(rng: random.Random, text: str) -> str:
    """The same request as people type it: sometimes without capital, mark at the end, or with a courtesy."""
    if rng.random() < 0.08 and not text.lower().startswith("please"):
        text = rng.choice(OPENINGS) + text
    if rng.random() < 0.28 and text[:1].isupper() and text[1:2].islower():
        text = text[0].lower() + text[1:]
    if rng.random() < 0.28 and text[-1] in ".?":
        text = text[:-1]
    elif rng.random() < 0.05 and text[-1] == "?":
        text = text[:-1] + ", please?"
    return text
