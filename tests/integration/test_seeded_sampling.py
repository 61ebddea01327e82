from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest

from tests.integration.serving import Answer, complete, open_client
from tests.serving.server.running_server import RunningServer

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "top_p": 1.0},
    "nucleus": {"temperature": 0.9, "top_p": 0.8},
    "candidates": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "wide": {"temperature": 1.0, "top_k": 300, "top_p": 1.0},
    "penalized": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {"65": 3.0}},
}


def seeded(rng: np.random.Generator) -> list[dict[str, Any]]:
    return [
        kind
        | {
            "prompt": rng.integers(331, size=20).tolist(),
            "seed": int(rng.integers(-(2**63), 2**63 - 1)),
            "max_tokens": 40,
            "ignore_eos": True,
        }
        for kind in KINDS.values()
    ]


async def answers_alone(server: RunningServer, bodies: list[dict[str, Any]]) -> list[Answer]:
    async with open_client(server) as client:
        return [await complete(client, body) for body in bodies]


async def answers_under_load(
    server: RunningServer, bodies: list[dict[str, Any]], load: list[dict[str, Any]]
) -> list[Answer]:
    async with open_client(server) as client:
        others = [asyncio.create_task(complete(client, body)) for body in load[::2]]
        answers = [asyncio.create_task(complete(client, body)) for body in bodies]
        others += [asyncio.create_task(complete(client, body)) for body in load[1::2]]
        await asyncio.gather(*others)
        return await asyncio.gather(*answers)


def test_a_seeded_request_draws_the_same_tokens_alone_and_under_load(tight_server, rng):
    bodies = seeded(rng)
    load = [
        {"prompt": rng.integers(331, size=rng.integers(1, 50)).tolist(), "max_tokens": 50, "temperature": 1.0}
        for _ in range(24)
    ]
    alone = asyncio.run(answers_alone(tight_server, bodies))
    before = tight_server.metric("num_preemptions_total")
    loaded = asyncio.run(answers_under_load(tight_server, bodies, load))
    tight_server.wait_until_unused()
    tight_server.wait_for(lambda: tight_server.metric("num_preemptions_total") > before)  # as the load is meant to
    assert loaded == alone
    assert all(len(answer.token_ids) == 40 for answer in alone)


def test_another_seed_draws_other_tokens(tight_server, rng):
    body = seeded(rng)[0]
    first, second = asyncio.run(answers_alone(tight_server, [body, body | {"seed": body["seed"] ^ 1}]))
    assert first.token_ids != second.token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_seeded_request_differ_and_repeat(stream, tight_server, rng):
    body = {"model": "tiny", "prompt": "hello", "n": 3, "seed": int(rng.integers(2**40)), "max_tokens": 20}
    body |= {"temperature": 1.0, "stream": stream}

    def texts() -> list[str]:
        if not stream:
            return [choice["text"] for choice in tight_server.post("/v1/completions", body).json()["choices"]]
        collected = ["", "", ""]
        client = tight_server.client
        for chunk in client.completions.create(**body):
            for choice in chunk.choices:
                collected[choice.index] += choice.text
        return collected

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first


def test_an_unseeded_request_is_not_the_same_each_time(tight_server):
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 20, "temperature": 1.5, "top_p": 1.0}
    replies: list[httpx.Response] = [tight_server.post("/v1/completions", body) for _ in range(3)]
    assert len({reply.json()["choices"][0]["text"] for reply in replies}) > 1
