"""Turning a sentence into JSON by a small given schema."""

from __future__ import annotations

import json
import random
from typing import Any

from .base import Message, Sample, Split, assistant, join_words, split_of, user
from .domains import DOMAINS, loose_domain

# {s} the sentence; {m} a schema, {t} the keys with their types, {k} the keys.
ASKS = (
    "Turn this sentence into JSON: {s}\nSchema: {m}",
    "Extract JSON with the schema {m} from this sentence: {s}",
    "{s}\n\nReturn this as JSON with {k}.",
    "Give me JSON with the keys {k} for: {s}",
    "Convert to JSON ({t}): {s}",
    "Sentence: {s}\nJSON schema: {m}",
    "{s} Write it as JSON with {t}.",
    "Fill this schema: {m}\nText: {s}",
)
FREE_ASKS = (
    "Extract the {k} as JSON: {s}",
    "Extract {k} from this text as JSON: {s}",
    "Extract {k} from: {s}",
    "{s} Extract the {k} as JSON.",
    "{s}\nGive me the {k} as JSON.",
    "{s}\nJSON with {k} please.",
    "Give me a JSON object with {k}: {s}",
    "Give me a JSON object with the fields {k} for this text: {s}",
    "Make JSON of this: {s} Use the keys {k}.",
    "Make a JSON object with {k} from: {s}",
    "Can you turn this into JSON with {k}? {s}",
    "Can you give me {k} as JSON? {s}",
    "Return {k} as a JSON object. {s}",
    "Reply with JSON only, keys {k}: {s}",
    "Write the following as JSON with the fields {k}: {s}",
    "I need this as JSON with {k}: {s}",
    "Parse this into JSON ({k}): {s}",
    "Convert this sentence to JSON with {k}: {s}",
    "Turn this into JSON with the keys {k}: {s}",
    "Put this into JSON with keys {k}. {s}",
    "json with {k}: {s}",
    "JSON ({k}): {s}",
    "Text: {s}\nFields: {k}\nJSON:",
    "Output JSON matching {m}. Input: {s}",
    "Use this JSON schema: {m}\n{s}",
    "Answer in JSON with {t}. {s}",
    "What are the {k} here? Answer in JSON. {s}",
)
BARE_ASKS = (
    "Turn this sentence into JSON: {s}",
    "Convert this to JSON: {s}",
    "Write this as JSON: {s}",
    "{s} As JSON, please.",
    "Make JSON of this: {s}",
)
SYSTEM_ASKS = (
    "Answer only with JSON that fits {m}.",
    "Extract {k} and reply with JSON only.",
    "You turn sentences into JSON with this schema: {m}",
    "Reply in JSON with {k}.",
    "Output a JSON object with {t}.",
)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "vegetarian" if value else "not vegetarian"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _ask(rng: random.Random, template: str, types: dict[str, str], sentence: str) -> str:
    keys = list(types)
    schema = json.dumps(types)
    if rng.random() < 0.3:
        properties = {key: {"type": kind} for key, kind in types.items()}
        whole: dict[str, Any] = {"type": "object", "properties": properties}
        schema = json.dumps(whole if rng.random() < 0.5 else {**whole, "required": keys})
    typed = ", ".join(f"{key}: {kind}" for key, kind in types.items())
    listed = join_words(keys) if rng.random() < 0.7 else ", ".join(keys)
    template = template.replace("{m}", schema).replace("{t}", typed).replace("{k}", listed)
    return template.replace("{s}", sentence)


def _problem(rng: random.Random, split: Split) -> tuple[str, list[Message]]:
    """A key, and the messages of one extraction."""
    while True:
        domain = rng.choice(DOMAINS) if rng.random() < 0.8 else loose_domain(rng)
        values = {key: draw(rng) for key, (_, draw) in domain.fields.items()}
        key = f"json:{json.dumps(values)}"
        if split_of(key) == split:
            break
    sentence = rng.choice(domain.sentences)
    for name, value in values.items():
        sentence = sentence.replace("{" + name + "}", _words(value))
    bare = domain in DOMAINS[:2] and rng.random() < 0.1
    chosen = list(values)
    if not bare and rng.random() < 0.3:
        rng.shuffle(chosen)
    if not bare and rng.random() < 0.35:
        chosen = chosen[: rng.randint(1, len(chosen))]
    types = {name: domain.fields[name][0] for name in chosen}
    answer = assistant(json.dumps({name: values[name] for name in chosen}))
    if not bare and rng.random() < 0.15:
        system = {"role": "system", "content": _ask(rng, rng.choice(SYSTEM_ASKS), types, "")}
        return key, [system, user(sentence), answer]
    template = rng.choice(BARE_ASKS if bare else ASKS if rng.random() < 0.35 else FREE_ASKS)
    return key, [user(_ask(rng, template, types, sentence)), answer]


def extract(rng: random.Random, split: Split) -> Sample:
    """A sentence and a schema of one to four fields; the answer is one JSON object in the schema's order.

    In training, one or two others may come before it.
    """
    key, messages = _problem(rng, split)
    earlier: list[Message] = []
    if split == "train" and messages[0]["role"] == "user":
        for _ in range(rng.choice((0, 0, 1, 2))):
            other = _problem(rng, split)[1]
            earlier += other if other[0]["role"] == "user" else []
    return Sample("JSON", key, (*earlier, *messages))
