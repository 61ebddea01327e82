from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.integration.serving import Answer, complete, open_client, serve, stream
from tests.serving.server.running_server import RunningServer
from tokenmill import LLM, SamplingParams

NUM_CLIENTS = 64
WORDS = ("the", "quick", "brown", "mill", "grinds", "tokens;", "hällo", "wörld,", "你好", "🙂👍🏽", "one", "two")

OTHER_SERVERS = {
    "roomy": ("--tokenizer-workers", "2"),
    "overlapped": ("--num-pages", "20", "--async-scheduling", "--tokenizer-workers", "0"),
}


def random_bodies(rng: np.random.Generator, vocab_size: int) -> list[dict[str, Any]]:
    """Greedy requests: texts, token ids and conversations, some with a common beginning, of random lengths."""
    shared = rng.integers(vocab_size, size=60).tolist()
    bodies: list[dict[str, Any]] = []
    for _ in range(NUM_CLIENTS):
        text = " ".join(rng.choice(WORDS, size=rng.integers(1, 12)))
        body = {"temperature": 0, "max_tokens": int(rng.integers(1, 70)), "ignore_eos": bool(rng.random() < 0.5)}
        kind = rng.integers(4)
        if kind == 0:
            bodies.append(body | {"messages": [{"role": "user", "content": text}]})
        elif kind == 1:
            bodies.append(body | {"prompt": text})
        else:
            own = rng.integers(vocab_size, size=rng.integers(1, 60)).tolist()
            bodies.append(body | {"prompt": own if kind == 2 else shared[: rng.integers(1, 61)] + own})
    return bodies


def answer_offline(offline: LLM, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Return the answers of `LLM`, all in one batch."""
    results = []
    for body in bodies:
        params = SamplingParams(temperature=0.0, max_tokens=body["max_tokens"], ignore_eos=body["ignore_eos"])
        results.append(offline.submit(body.get("prompt") or body["messages"], params))
    while not all(result.finished for result in results):
        offline.step()
    outputs = [result.outputs[0] for result in results]
    return [Answer(output.text, output.token_ids, output.finish_reason) for output in outputs]


async def stay_or_leave(client, body: dict[str, Any], leave_after: int | None) -> Answer | None:
    """The whole answer; or None after leaving, with that many chunks read."""
    if leave_after is None:
        return await complete(client, body)
    if leave_after == 0:
        # Nothing read yet: the request may be anywhere on its way in.
        waiting = asyncio.create_task(complete(client, body))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return None
    chunks = stream(client, body)
    num_read = 0
    async for _ in chunks:
        num_read += 1
        if num_read == leave_after:
            break
    await chunks.aclose()
    return None


async def all_at_once(
    server: RunningServer, bodies: list[dict[str, Any]], leaving: list[int | None]
) -> list[Answer | None]:
    async with open_client(server) as client:
        return await asyncio.gather(
            *(stay_or_leave(client, body, after) for body, after in zip(bodies, leaving, strict=True))
        )


def check_many_clients(server: RunningServer, offline: LLM, rng: np.random.Generator) -> None:
    bodies = random_bodies(rng, offline.info.vocab_size)
    expected = answer_offline(offline, bodies)
    leaving = [int(rng.integers(0, 8)) if rng.random() < 0.2 else None for _ in bodies]
    answers = asyncio.run(all_at_once(server, bodies, leaving))
    for body, answer, offline_answer, after in zip(bodies, answers, expected, leaving, strict=True):
        if after is None:
            assert answer == offline_answer, body
    server.wait_until_unused()


@pytest.mark.parametrize("kind", OTHER_SERVERS)
def test_every_kept_stream_is_the_offline_answer_and_nothing_stays_in_use(kind, model, offline, rng):
    with serve(model, *OTHER_SERVERS[kind]) as server:
        check_many_clients(server, offline, rng)


def test_so_it_is_when_requests_preempt_one_another(tight_server, offline, rng):
    before = tight_server.metric("num_preemptions_total")
    check_many_clients(tight_server, offline, rng)
    tight_server.wait_for(lambda: tight_server.metric("num_preemptions_total") > before)  # the pool is too small
