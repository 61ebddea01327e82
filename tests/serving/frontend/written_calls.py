"""Calls as models of each notation write them, and calls to write."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from typing import Any

Call = tuple[str, dict[str, Any]]
SPACES = ["", " ", "\n", "  \n"]


def write_hermes(rng: random.Random, calls: list[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        written: Any = json.dumps(arguments) if rng.random() < 0.2 else arguments
        pairs = [("name", name), ("arguments", written)]
        pairs.insert(rng.randint(0, 2), ("note", rng.choice([1, "a}b", [1, {"name": "x"}], None])))
        rng.shuffle(pairs)
        return f"<tool_call>{rng.choice(SPACES)}{json.dumps(dict(pairs))}{rng.choice(SPACES)}</tool_call>"

    return rng.choice(SPACES).join(one(*call) for call in calls)


def write_llama3(rng: random.Random, calls: list[Call]) -> str:
    key = rng.choice(["parameters", "arguments"])
    texts = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    return rng.choice(["", "<|python_tag|>"]) + rng.choice(["; ", ";", "\n", ", "]).join(texts)


def write_mistral(rng: random.Random, calls: list[Call]) -> str:
    if rng.random() < 0.5:
        written = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return "[TOOL_CALLS]" + rng.choice(SPACES) + json.dumps(written)
    separator = rng.choice(["[ARGS]", ""])
    return "".join(f"[TOOL_CALLS]{name}{separator}{json.dumps(arguments)}" for name, arguments in calls)


def write_pythonic(rng: random.Random, calls: list[Call]) -> str:
    def value(item: Any) -> str:
        return repr(item) if rng.random() < 0.7 else json.dumps(item)

    texts = [f"{name}({', '.join(f'{key}={value(item)}' for key, item in args.items())})" for name, args in calls]
    return f"[{', '.join(texts)}]"


def write_qwen3_coder(rng: random.Random, calls: list[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        values = {key: item if isinstance(item, str) else json.dumps(item) for key, item in arguments.items()}
        written = "".join(f"<parameter={key}>\n{item}\n</parameter>\n" for key, item in values.items())
        return f"<tool_call>{rng.choice(SPACES)}<function={name}>\n{written}</function>\n</tool_call>"

    return rng.choice(SPACES).join(one(*call) for call in calls)


def write_lfm2(rng: random.Random, calls: list[Call]) -> str:
    return f"<|tool_call_start|>{rng.choice(SPACES)}{write_pythonic(rng, calls)}<|tool_call_end|>"


def write_granite(rng: random.Random, calls: list[Call]) -> str:
    written = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return rng.choice(["<|tool_call|>", "<tool_call>"]) + rng.choice(SPACES) + json.dumps(written)


def write_phi4(rng: random.Random, calls: list[Call]) -> str:
    written = json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    return rng.choice([f"functools{written}", f"<|tool_call|>{written}<|/tool_call|>"])


def write_gemma4(rng: random.Random, calls: list[Call]) -> str:
    def value(item: Any) -> str:
        if isinstance(item, str):
            return f'<|"|>{item}<|"|>'
        if isinstance(item, dict):
            return "{" + ",".join(f"{key}:{value(one)}" for key, one in item.items()) + "}"
        return "[" + ",".join(map(value, item)) + "]" if isinstance(item, list) else json.dumps(item)

    return "".join(f"<|tool_call>call:{name}{value(arguments)}<tool_call|>" for name, arguments in calls)


WRITERS: dict[str, Callable[[random.Random, list[Call]], str]] = {
    "hermes": write_hermes,
    "llama3_json": write_llama3,
    "mistral": write_mistral,
    "pythonic": write_pythonic,
    "qwen3_coder": write_qwen3_coder,
    "lfm2": write_lfm2,
    "granite": write_granite,
    "phi4_mini_json": write_phi4,
    "gemma4": write_gemma4,
}


def random_value(rng: random.Random, depth: int = 2) -> Any:
    text = "".join(rng.choice(string.ascii_letters + " <>{}[]()\"'\\,;:=\né👍") for _ in range(rng.randint(0, 12)))
    leaves = [rng.randint(-99, 99), rng.random(), True, False, None, text, text + "</tool_call>", "[TOOL_CALLS]" + text]
    if depth and rng.random() < 0.4:
        inner = [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
        return inner if rng.random() < 0.5 else {f"k{number}": item for number, item in enumerate(inner)}
    return rng.choice(leaves)


def random_calls(rng: random.Random) -> list[Call]:
    count = rng.randint(1, 3)
    return [
        (rng.choice(["get", "get_weather", "a.b"]), {f"arg{n}": random_value(rng) for n in range(rng.randint(0, 3))})
        for _ in range(count)
    ]
