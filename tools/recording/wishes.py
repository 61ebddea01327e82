"""Random prompts and sampling parameters, as plain data: equal seeds give equal requests."""

from __future__ import annotations

from random import Random
from typing import Any

# Ids below this are in every checkpoint's vocabulary and are no special tokens.
NUM_PLAIN_IDS = 250
WORDS = ("the", "mill", "fox", "dog", "hello", "one", "two", "Käse", "and then", "water", "12", "over")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA},
    {"json_object": True},
    {"regex": "[a-c]{2,8}-[0-9]{1,3}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"grammar": 'start: "<" /[a-z]+/ ">"'},
)


def prompt(rng: Random, prefixes: list[list[int]]) -> str | list[int] | list[dict[str, str]]:
    """A text, a conversation, or token ids, most of them behind the beginning of a prefix that others share."""
    kind = rng.random()
    if kind < 0.15:
        return words(rng, 12)
    if kind < 0.25:
        return [{"role": "user", "content": words(rng, 6)}]
    shared = rng.choice(prefixes)
    return shared[: rng.randrange(len(shared) + 1)] + token_ids(rng, rng.choice((1, 5, 20, 40)))


def words(rng: Random, most: int) -> str:
    """A few words."""
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def token_ids(rng: Random, most: int) -> list[int]:
    """1 to `most` token ids."""
    return [rng.randrange(NUM_PLAIN_IDS) for _ in range(rng.randint(1, most))]


def sampling(rng: Random, in_session: bool = False, grammar: bool = False) -> dict[str, Any]:
    """Fields of `SamplingParams`; without those that a session, or a request with a grammar, does not take."""
    max_tokens = rng.randint(1, 24)
    wishes: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
    if rng.random() < 0.7:
        wishes |= _drawn(rng)
    optional = _common(rng, max_tokens)
    if not in_session:
        optional |= {
            "n": rng.randint(2, 3),
            "prompt_logprobs": rng.randint(0, 4),
            "bad_words": [rng.choice(WORDS) for _ in range(2)],
            "stop": [rng.choice("aeiou ")],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
        }
    if grammar:
        optional.pop("allowed_token_ids")
        wishes |= {"max_tokens": 40, "structured_outputs": rng.choice(GRAMMARS)}
    else:
        wishes["ignore_eos"] = rng.random() < 0.5
        wishes["logprobs"] = rng.choice((None, None, 0, 3, 20))
    return wishes | {name: value for name, value in optional.items() if rng.random() < 0.12}


def _drawn(rng: Random) -> dict[str, Any]:
    filters = {
        "top_p": round(rng.uniform(0.3, 1.0), 3),
        "top_k": rng.randint(1, 40),
        "min_p": round(rng.uniform(0.0, 0.3), 3),
        "seed": rng.randrange(-(2**40), 2**40),
    }
    chosen = {name: value for name, value in filters.items() if rng.random() < 0.4}
    return {"temperature": round(rng.uniform(0.2, 1.8), 3), **chosen}


def _common(rng: Random, max_tokens: int) -> dict[str, Any]:
    return {
        "presence_penalty": round(rng.uniform(-2, 2), 3),
        "frequency_penalty": round(rng.uniform(-2, 2), 3),
        "repetition_penalty": round(rng.uniform(0.5, 2), 3),
        "logit_bias": {rng.randrange(NUM_PLAIN_IDS): round(rng.uniform(-8, 8), 3) for _ in range(4)},
        "allowed_token_ids": sorted(rng.sample(range(NUM_PLAIN_IDS), 20)),
        "min_tokens": rng.randint(0, max_tokens),
        "stop_token_ids": sorted(rng.sample(range(NUM_PLAIN_IDS), 30)),
    }
