"""Engines and text workers are killed under load: every stream is whole, and the same as without that."""

import asyncio
import concurrent.futures
import os
import random
import signal
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.killing_engine import KILLS
from tests.server.packing_engine import PACKS
from tests.server.running_server import start_server
from tests.server.test_hangs import child
from tests.server.test_lifecycle import open_stream
from tokenmill.config import EngineConfig
from tokenmill.server.process.launch import ENGINE_MODULE

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
# One of each kind that keeps something besides its tokens: draws, penalties, grammars, text held back, probabilities.
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    {"temperature": 1.0, "seed": 6, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 7, "n": 2},
    {"temperature": 0.7, "seed": 8, "logprobs": True, "top_logprobs": 3},
    {"temperature": 1.0, "seed": 9, "stop": ["e", "qu"], "extra_body": {"min_tokens": 60}},
    {
        "temperature": 1.0,
        "seed": 10,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    {"temperature": 1.0, "seed": 11, "long": True},
]


@pytest.fixture(scope="module")
def server(tiny_checkpoint):
    engine = EngineConfig(model=str(tiny_checkpoint), dtype="bfloat16", num_pages=400, max_num_seqs=12)
    with start_server(engine, ENGINE_MODULE, max_restarts=100) as running:
        yield running


async def answer(client: openai.AsyncOpenAI, number: int) -> tuple:
    """The text, ends, log probabilities and usage of one call, joined from its stream."""
    kind = dict(KINDS[number % len(KINDS)])
    words = 60 if kind.pop("long", False) else 6
    messages = [{"role": "user", "content": f"{number} " + "tell me of a mill " * (words // 6)}]
    stream = await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=150, stream=True, stream_options={"include_usage": True}, **kind
    )
    texts, ends, logprobs, usage = {}, {}, {}, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.logprobs is not None:
                logprobs.setdefault(choice.index, []).extend(repr(one) for one in choice.logprobs.content or ())
            if choice.finish_reason is not None:
                assert choice.index not in ends, "one end each"
                ends[choice.index] = choice.finish_reason
    return texts, ends, logprobs, (usage.prompt_tokens, usage.completion_tokens)


async def answers(server, count: int) -> list[tuple]:
    async with server.async_client as client:
        return await asyncio.gather(*(answer(client, number) for number in range(count)))


@pytest.mark.parametrize("victim", ["engine.process", "frontend.worker"])
def test_streams_outlive_the_death_of_a_part(server, victim):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    undisturbed = asyncio.run(answers(server, 16))
    before = server.output().count("was killed by SIGKILL")

    async def disturbed() -> list[tuple]:
        calls = asyncio.ensure_future(answers(server, 16))
        for _ in range(2):
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            if calls.done():
                break
            await asyncio.to_thread(kill_again, server, victim)
        return await calls

    assert asyncio.run(disturbed()) == undisturbed
    server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)
    server.wait_until_unused()
    assert server.output().count("was killed by SIGKILL") > before, "in vain, if no part died while streams ran"
    assert "Traceback" not in server.output()


def kill_again(server, victim: str) -> None:
    """Kill a part, once the server has recovered from its last death: nobody is under suspicion any more."""
    server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)
    os.kill(child(server, victim), signal.SIGKILL)


def test_a_request_that_kills_engines_ends_alone(tiny_checkpoint):
    engine = EngineConfig(model=str(tiny_checkpoint), dtype="bfloat16", num_pages=400, max_num_seqs=12)
    with start_server(engine, "tests.server.killing_engine") as server:
        body = {"max_tokens": 40, "temperature": 1.0, "ignore_eos": True}
        prompts = [[20 + number, 3] for number in range(6)]
        undisturbed = [completion(server, body | {"prompt": prompt, "seed": 1}).json() for prompt in prompts]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(completion, server, body | {"prompt": prompt, "seed": 1}) for prompt in prompts[:3]]
            poison = pool.submit(completion, server, body | {"prompt": [KILLS, 3]})
            calls += [pool.submit(completion, server, body | {"prompt": prompt, "seed": 1}) for prompt in prompts[3:]]
            assert poison.result().status_code == 500
            assert "died twice while it ran this request" in poison.result().json()["error"]["message"]
            texts = [call.result().json()["choices"] for call in calls]
        assert texts == [reply["choices"] for reply in undisturbed]
        server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200)
        server.wait_until_unused()
        assert server.output().count("the engine process was killed by SIGKILL") == 2


def test_a_stream_says_that_it_waits_for_an_engine_and_the_third_death_ends_the_server(slow_model):
    with start_server(EngineConfig(model=str(slow_model))) as server:
        lines: list[str] = []
        thread = open_stream(server, lines, max_tokens=500)
        for number in range(1, 4):
            os.kill(child(server, "stub_engine"), signal.SIGKILL)
            server.wait_for(lambda number=number: server.output().count("was killed by SIGKILL") == number)
            server.wait_for(lambda: server.process.poll() is not None or "stub_engine" in " ".join(server.children()))
        assert server.wait_for_end(60) == 1
        thread.join(30)
        assert '"type":"engine_unavailable"' in lines[-2]
        assert ": recovering" in lines
        assert "3 deaths in a minute" in server.output()


def completion(server, body) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


@pytest.mark.parametrize("has_cache", [True, False])
def test_an_engine_that_comes_back_maps_the_weights_of_the_dead_one(tiny_checkpoint, tmp_path, has_cache):
    own = {"weight_cache": has_cache, "weight_cache_dir": str(tmp_path)}
    engine = EngineConfig(model=str(tiny_checkpoint), dtype="bfloat16", num_pages=400, **own)
    with start_server(engine, "tests.server.packing_engine") as server:
        body = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, "prompt": [20, 3]}
        before = completion(server, body).json()["choices"]
        first = child(server, "packing_engine")
        kill_again(server, "packing_engine")
        assert completion(server, body).json()["choices"] == before
        maps = Path(f"/proc/{child(server, 'packing_engine')}/maps").read_text()
        shared = [line for line in maps.splitlines() if str(tmp_path) in line or "memfd:tokenmill-weights" in line]
        assert child(server, "packing_engine") != first
        assert ["r--s" in line for line in shared] == [True]
        assert (str(tmp_path) in shared[0]) == has_cache
        assert server.output().count(f"[engine] {PACKS}") == 1
