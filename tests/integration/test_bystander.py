"""Requests that must be refused, thrown at a real server while a bystander's answers are compared bit for bit."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import numpy as np

from tests.integration.serving import MODEL_NAME, open_client
from tests.serving.server.running_server import RunningServer
from tests.tiers import some
from tokenmill.serving.server.openai.chat import ChatBody
from tokenmill.serving.server.openai.completions import TextBody

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

# As they stand in a body: JSON has no NaN and no infinity, but clients send them.
VALUES = {
    "nan": "NaN",
    "infinity": "Infinity",
    "minus infinity": "-Infinity",
    "beyond float": "1e999",
    "minus one": "-1",
    "zero": "0",
    "huge negative": str(-(2**63) - 1),
    "2**31": str(2**31),
    "2**63": str(2**63),
    "2**64": str(2**64),
    "fraction": "0.5",
    "tiny": "1e-320",
    "1e300": "1e300",
    "true": "true",
    "text": '"x"',
    "number as text": '"1"',
    "empty text": '""',
    "list": "[]",
    "object": "{}",
    "nested": '{"a": [[{"b": [null]}]]}',
    "deep": "[" * 300 + "]" * 300,
    "list of nan": "[NaN]",
    "list of -1": "[-1]",
    "list of 2**31": "[2147483648]",
    "list past the vocabulary": "[331]",
    "list of lists": "[[]]",
    "list of empty text": '[""]',
    "bias past the vocabulary": '{"331": 1}',
    "bias of -1": '{"-1": 1}',
    "bias without a number": '{"1": "x"}',
    "bias of nan": '{"1": NaN}',
    "bias of true": '{"1": true}',
}

_BOOLEANS = {"true"}
_NUMBERS = {"minus one", "zero", "fraction"}
_TEXTS = {"text", "number as text"}
_LABELS = {*_TEXTS, "empty text"}
_OBJECTS = {"object", "nested", "bias past the vocabulary", "bias of -1", "bias without a number", "bias of true"}

# The pairs that are right after all, or of fields that change nothing here. All others must be refused.
VALID: dict[str, set[str]] = {
    "add_generation_prompt": _BOOLEANS,
    "add_special_tokens": _BOOLEANS,
    "bad_words": {"list"},
    "cache_salt": _LABELS,
    "chat_template_kwargs": _OBJECTS,
    "continue_final_message": _BOOLEANS,
    "detokenize": _BOOLEANS,
    "documents": {"list"},
    "frequency_penalty": _NUMBERS | {"tiny"},
    "functions": {"list"},
    "ignore_eos": _BOOLEANS,
    "include_reasoning": _BOOLEANS,
    "include_stop_str_in_output": _BOOLEANS,
    "kv_transfer_params": {"object"},
    "logit_bias": {"object"},
    "metadata": _OBJECTS,
    "min_p": {"zero", "fraction", "tiny"},
    "min_tokens": {"zero"},
    "mm_processor_kwargs": {"object"},
    "parallel_tool_calls": _BOOLEANS,
    "presence_penalty": _NUMBERS | {"tiny"},
    "priority": {"zero"},
    "prompt": _TEXTS,
    "prompt_logprobs": {"zero"},
    "prompt_cache_key": _LABELS,
    "prompt_cache_retention": _LABELS,
    "repetition_penalty": {"2**31", "2**63", "2**64", "1e300", "fraction", "tiny"},
    "request_id": _LABELS,
    "return_progress": _BOOLEANS,
    "return_token_ids": _BOOLEANS,
    "safety_identifier": _LABELS,
    "seed": {"minus one", "zero", "2**31"},
    "separate_reasoning": _BOOLEANS,
    "service_tier": _LABELS,
    "skip_special_tokens": _BOOLEANS,
    "spaces_between_special_tokens": _BOOLEANS,
    "stop": {*_TEXTS, "list"},
    "stop_token_ids": {"list"},
    "store": _BOOLEANS,
    "stream": _BOOLEANS,
    "stream_reasoning": _BOOLEANS,
    "suffix": {"empty text"},
    "temperature": {"zero", "fraction", "tiny"},
    "thinking_token_budget": {"zero"},
    "timeout": {"fraction"},
    "timings_per_token": _BOOLEANS,
    "tools": {"list"},
    "truncate_prompt_tokens": {"minus one"},
    "top_k": {"minus one", "zero"},
    "top_p": {"fraction", "tiny"},
    "user": _LABELS,
    "verbosity": _LABELS,
    "vllm_xargs": {"object"},
}

RIGHT_FOR_ONE_ROUTE = {(CHAT, "logprobs", "true"), (TEXT, "logprobs", "zero"), (TEXT, "echo", "true")}
ALL_FIELDS = sorted({*ChatBody.__struct_fields__, *TextBody.__struct_fields__})


def cases(rng: np.random.Generator) -> list[tuple[str, str, str, bool]]:
    """(path, field, value name, whether it is right) of each pair; a field of both routes goes to one, by chance."""
    kinds = {CHAT: ChatBody, TEXT: TextBody}
    fields = {field: [path for path in kinds if field in kinds[path].__struct_fields__] for field in ALL_FIELDS}
    found = []
    for field, value in itertools.product(ALL_FIELDS, VALUES):
        path = str(rng.choice(fields[field]))
        is_right = value in VALID.get(field, ()) or (path, field, value) in RIGHT_FOR_ONE_ROUTE
        found.append((path, field, value, is_right))
    return found


def body_of(path: str, field: str, value: str) -> str:
    base: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 1}
    base |= {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    base.pop(field, None)
    return json.dumps(base)[:-1] + f', "{field}": {VALUES[value]}}}'


RAW_BODIES: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"prompt=hello",
    "not UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "cut short": b'{"model": "tiny", "prompt": "x',
    "a list": b"[]",
    "null": b"null",
    "a number": b"1",
    "no prompt": b'{"model": "tiny"}',
    "another model": b'{"model": "../../etc/passwd", "prompt": "x"}',
    "a misspelt field": b'{"model": "tiny", "prompt": "x", "promt": {}}',
    "nested too deep": b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "too many prompts": json.dumps({"model": "tiny", "prompt": ["x"] * 5000}).encode(),
    "too many choices": json.dumps({"model": "tiny", "prompt": ["x"] * 200, "n": 128}).encode(),
    "longer than the context": json.dumps({"model": "tiny", "prompt": [1] * 5000}).encode(),
    "no room for output": json.dumps({"model": "tiny", "prompt": [1] * 256}).encode(),
    "min above max": b'{"model": "tiny", "prompt": "x", "min_tokens": 9, "max_tokens": 3}',
    "too large": b'{"model": "tiny", "prompt": "' + b"x" * (17 * 2**20) + b'"}',
}


async def check_pair(client: httpx.AsyncClient, path: str, field: str, value: str, is_right: bool) -> None:
    reply = await client.post(path, content=body_of(path, field, value))
    what = (path, field, value, reply.status_code, reply.text[:300])
    if is_right:
        is_over = (field, reply.status_code) == ("timeout", 408)  # on a busy machine half a second may be
        assert reply.status_code == 200 or is_over, what
    else:
        assert 400 <= reply.status_code < 500, what
        error = reply.json()["error"]
        assert error["message"], what
        # A body that is no JSON has no fields to name, and a time that is over is nobody's fault.
        assert error["param"] == field or "not valid JSON" in error["message"] or reply.status_code == 408, what
        assert "Traceback" not in reply.text, what
        assert "/tokenmill/" not in reply.text, what


async def check_raw(client: httpx.AsyncClient, name: str) -> None:
    reply = await client.post(TEXT, content=RAW_BODIES[name])
    assert 400 <= reply.status_code < 500, (name, reply.status_code, reply.text[:300])
    assert reply.json()["error"]["message"], name


async def one_after_another(checks: Iterator[Coroutine[Any, Any, None]]) -> None:
    for check in checks:
        await check


async def ask(client: httpx.AsyncClient) -> list[Any]:
    """The bystander's choices: a greedy one and a drawn one, each with log probabilities."""
    body = {"model": MODEL_NAME, "prompt": "the mill grinds", "max_tokens": 60, "ignore_eos": True, "logprobs": 5}
    drawn = body | {"temperature": 1.0, "seed": 7}
    replies = [(await client.post(TEXT, json=one)) for one in (body | {"temperature": 0}, drawn)]
    return [choice for reply in replies for choice in reply.json()["choices"]]


async def throw(
    server: RunningServer, checks: Iterator[Coroutine[Any, Any, None]], look_at: Callable[[Any], Any]
) -> int:
    """Run checks, six at a time, beside a bystander; returns how often the bystander was answered.

    Args:
        look_at: what of each of the bystander's choices must stay the same.
    """
    async with open_client(server) as client:
        await ask(client)  # From now on the prefix cache holds the prompt.
        expected = [look_at(choice) for choice in await ask(client)]
        thrown = asyncio.gather(*(one_after_another(checks) for _ in range(6)))
        num_answers = 0
        while not thrown.done():
            assert [look_at(choice) for choice in await ask(client)] == expected
            num_answers += 1
        await thrown
        return num_answers


def test_refused_requests_do_not_change_a_bit_of_a_bystanders_answer(tight_server, rng):
    order = some([case for case in cases(rng) if not case[3] and case[1:3] != ("timeout", "tiny")], 400)
    rng.shuffle(order)

    async def run() -> int:
        async with open_client(tight_server) as client:
            pairs = (check_pair(client, *case) for case in order)
            return await throw(
                tight_server,
                itertools.chain(pairs, (check_raw(client, name) for name in RAW_BODIES)),
                lambda choice: choice,
            )

    assert asyncio.run(run()) > 0, "the bystander was there while it went on"
    assert tight_server.is_well()
    tight_server.wait_until_unused()


def test_odd_but_right_requests_do_not_change_a_bystanders_tokens(tight_server, rng):
    order = [case for case in cases(rng) if case[3] or case[1:3] == ("timeout", "tiny")]
    rng.shuffle(order)

    async def run() -> int:
        async with open_client(tight_server) as client:
            # In another batch the same sums may end in other last bits; log probabilities show them, tokens do not.
            return await throw(
                tight_server, (check_pair(client, *case) for case in order), lambda choice: choice["text"]
            )

    assert asyncio.run(run()) > 0, "the bystander was there while it went on"
    assert tight_server.is_well()
    tight_server.wait_until_unused()
