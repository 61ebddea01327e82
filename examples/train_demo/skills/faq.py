"""Questions about TokenMill: many phrasings of a bounded set of facts, one answer each.

A phrasing is (fact, subject, frame); whole phrasings are held out, so a held-out question asks for a known fact
in words never seen together.
"""

from __future__ import annotations

import random

from .base import Fact, Sample, Split, assistant, casual, split_of, user
from .faq_answers import CAN, MISC
from .faq_concepts import CONCEPTS
from .faq_usage import FLAGS, HOWTO, ROUTES

FACTS: tuple[Fact, ...] = CONCEPTS + FLAGS + ROUTES + HOWTO + CAN + MISC

FRAMES: dict[str, tuple[str, ...]] = {
    "what": (
        "What is {x}?",
        "Explain {x}.",
        "What does {x} mean?",
        "Can you explain {x}?",
        "Tell me about {x}.",
        "What do you know about {x}?",
        "Describe {x}.",
        "What's {x}?",
        "Please explain {x} to me.",
        "{x}?",
        "I want to know about {x}.",
        "How would you describe {x}?",
        "Define {x}.",
        "What is {x} for?",
        "Could you tell me what {x} is?",
        "What exactly is {x}?",
        "Give me a short explanation of {x}.",
        "In one or two sentences, what is {x}?",
        "I do not understand {x}.",
        "What is meant by {x}?",
        "What is {x} in TokenMill?",
        "How does {x} work?",
        "Explain {x} in simple words.",
        "Whats {x}?",
        "So what is {x}?",
        "What on earth is {x}?",
        "Can you tell me what {x} is?",
        "Tell me what {x} is.",
        "Can you describe {x}?",
        "What do you mean by {x}?",
        "I have never heard of {x}.",
        "Give me a definition of {x}.",
        "Help me understand {x}.",
        "Why do I need {x}?",
        "What does TokenMill mean by {x}?",
        "{x}, what is that?",
        "{x} meaning",
    ),
    "flag": (
        "What does {x} do?",
        "What is {x}?",
        "Explain {x}.",
        "What is the flag {x} for?",
        "What does {x} set?",
        "Tell me about {x}.",
        "How do I use {x}?",
        "What is the meaning of {x}?",
        "What is the option {x}?",
        "Can you explain the flag {x}?",
        "When should I use {x}?",
        "What happens with {x}?",
        "{x}?",
        "Describe the flag {x}.",
        "What can I set with {x}?",
        "I do not understand {x}.",
        "What's {x}?",
        "Whats {x} for?",
        "Can you tell me what {x} does?",
        "Tell me what {x} does.",
        "What is {x} good for?",
        "Why would I set {x}?",
        "What values does {x} take?",
    ),
    "route": (
        "What does {x} do?",
        "What is {x}?",
        "Explain {x}.",
        "What is {x} for?",
        "What does {x} return?",
        "Tell me about {x}.",
        "How do I use {x}?",
        "What do I get from {x}?",
        "What is {x} good for?",
        "Can you explain {x}?",
        "When should I call {x}?",
        "{x}?",
        "Describe {x}.",
        "What's {x}?",
        "Can you tell me what {x} does?",
        "Tell me what {x} does.",
        "Why would I call {x}?",
        "What is the endpoint {x}?",
    ),
    "how": (
        "How do I {x}?",
        "How can I {x}?",
        "How to {x}?",
        "Tell me how to {x}.",
        "What is the way to {x}?",
        "I want to {x}.",
        "How would I {x}?",
        "What must I do to {x}?",
        "Can you tell me how to {x}?",
        "Please explain how to {x}.",
        "What do I type to {x}?",
        "Is there a way to {x}?",
        "How does one {x}?",
        "Which command do I need to {x}?",
        "How do you {x}?",
        "How should I {x}?",
        "How can one {x}?",
        "How do we {x}?",
        "What's the command to {x}?",
        "What is the command to {x}?",
        "Help me to {x}.",
        "Can you help me {x}?",
        "Show me how to {x}.",
        "I need to {x}.",
        "I would like to {x}.",
        "I'd like to {x}, how?",
        "Is it possible to {x}?",
        "Can I {x}?",
    ),
    "can": (
        "Can TokenMill {x}?",
        "Does TokenMill {x}?",
        "Is TokenMill able to {x}?",
        "Can it {x}?",
        "Could it {x}?",
        "Will TokenMill {x}?",
        "I want to know if TokenMill can {x}.",
        "Tell me, can TokenMill {x}?",
        "Is it possible for TokenMill to {x}?",
        "Is it able to {x}?",
        "Does it {x}?",
        "Would TokenMill {x}?",
        "Do you know if TokenMill can {x}?",
    ),
    "free": (
        "{x}",
        "Tell me: {x}",
        "I wonder: {x}",
        "Do you know? {x}",
        "One more question: {x}",
        "{x} Please tell me.",
        "{x} I would like to know.",
        "About TokenMill: {x}",
    ),
}


def ask(rng: random.Random, split: Split) -> Sample:
    """One question about TokenMill and its answer."""

    def draw() -> tuple[str, tuple[str, str, bool]]:
        index = rng.randrange(len(FACTS))
        kind, subjects, answer = FACTS[index]
        subject, frame = rng.choice(subjects), rng.choice(FRAMES[kind])
        text = frame.replace("{x}", subject)
        return f"faq:{index}:{text}", (text, answer, frame == "{x}" and kind == "free")

    while True:
        key, (text, answer, bare) = draw()
        if ("train" if bare else split_of(key)) == split:  # a question of its own has no other words to learn from
            break
    text = text[0].upper() + text[1:] if text[0] != "-" and rng.random() < 0.9 else text
    text = text.lower() if rng.random() < 0.08 else casual(rng, text)
    return Sample("FAQ", key, (user(text), assistant(answer)))
