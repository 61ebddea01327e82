"""Budgets of thinking and `answer_now` over HTTP, with a model that never ends its thinking by itself."""

import asyncio
import json
import os
import signal

import httpx
import pytest

from tests.checkpoints import CHAT_TEMPLATE, make_checkpoint
from tests.eventually import eventually, eventually_async, patience
from tests.serving.server.running_server import start_server
from tests.tiers import some
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.server.process.launch import ENGINE_MODULE

MESSAGE = "\nSo much for that.\n"
# Tokens, 2,000 a second: what a test says to an answer comes before its end.
LONGEST = 16_384
THINKING = CHAT_TEMPLATE.replace("assistant\n' }}", "assistant\n<think>' }}")
ASK = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "seed": 3,
    "max_tokens": 90,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3", max_position_embeddings=LONGEST)


@pytest.fixture(scope="module", params=some([1, 2], 1), ids=lambda count: f"{count} API processes")
def server(request, checkpoint):
    engine = EngineConfig(model=str(checkpoint), num_pages=1200, max_num_seqs=4, max_model_len=LONGEST)
    served = {"chat_template": THINKING, "reasoning_parser": "qwen3", "reasoning_budget_message": MESSAGE}
    with start_server(
        engine, ENGINE_MODULE, served_model_name=("tiny",), **served, api_server_count=request.param
    ) as running:
        yield running


def chat(server, **fields):
    reply = server.post("/v1/chat/completions", ASK | fields)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    return body["choices"][0]["message"], body["usage"]["completion_tokens_details"]["reasoning_tokens"]


def test_a_budget_ends_thinking_with_a_message_that_is_part_of_it(server):
    unbounded, num_unbounded = chat(server)
    assert num_unbounded == 90
    assert not unbounded["content"]
    for budget in (0, 7):
        message, num_reasoning = chat(server, thinking_token_budget=budget)
        assert message["reasoning"].endswith(MESSAGE.strip())
        assert message["content"]
        forced = num_reasoning - budget
        own = message["reasoning"].removesuffix(MESSAGE.strip()).strip()
        assert unbounded["reasoning"].startswith(own[: len(own) // 2])
        assert 0 < forced < 60
        assert chat(server, thinking_budget_tokens=budget)[0] == message, "llama.cpp's name"


def test_other_ways_to_say_it(server):
    anthropic = {"model": "tiny", "messages": ASK["messages"], "max_tokens": 200, "temperature": 0}
    thinking = {"type": "enabled", "budget_tokens": 5}
    reply = server.post("/v1/messages", anthropic | {"thinking": thinking}).json()
    assert reply["content"][0]["thinking"].endswith(MESSAGE.strip())
    assert reply["content"][1]["type"] == "text"
    assert server.post("/v1/messages", anthropic | {"thinking": thinking | {"budget_tokens": -1}}).status_code == 400
    assert server.post("/v1/chat/completions", ASK | {"thinking_token_budget": -1}).status_code == 400
    none, _ = chat(server, reasoning_effort="none")
    assert none["reasoning"] == MESSAGE.strip(), "a template that knows no effort: the budget of that effort"


@pytest.mark.parametrize("way", ["answer_now", "control"])
def test_a_call_is_told_to_answer_now(server, way):
    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=patience()) as client:
            body = ASK | {"stream": True, "max_tokens": LONGEST - 200, "request_id": f"now-{way}"}
            body["stream_options"] = {"include_usage": True}
            reasoning = content = ""
            told, name, is_enough = None, f"chatcmpl-now-{way}", False
            async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
                async for line in reply.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    for choice in chunk["choices"]:
                        reasoning += choice["delta"].get("reasoning") or ""
                        content += choice["delta"].get("content") or ""
                    if chunk.get("usage"):
                        usage = chunk["usage"]
                    if told is None and len(reasoning) > 40:
                        if way == "control":
                            asked = {"id": name, "action": "reasoning_end"}
                            told = await client.post("/v1/chat/completions/control", json=asked)
                        else:
                            told = await client.post(f"/v1/requests/{name}/answer_now")
                    if len(content) > 100 and not is_enough:
                        is_enough = True
                        await client.post("/abort_requests", json={"request_ids": [name]})
            return reasoning, content, usage, told

    reasoning, content, usage, told = asyncio.run(run())
    assert told.status_code == 200, told.text
    assert told.json() == {"success": True} if way == "control" else len(told.json()["request_ids"]) == 1
    assert reasoning.endswith(MESSAGE.strip())
    assert len(content) > 100
    assert usage["completion_tokens"] < LONGEST - 200, "it was not its end that ended the thinking"
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert server.post("/v1/requests/none/answer_now").status_code == 404


def test_a_budget_holds_when_the_engine_dies_within_it(server):
    body = ASK | {"thinking_token_budget": 2000, "max_tokens": 2200}
    want, num_reasoning = chat(server, **body)

    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=patience(120)) as client:
            asked = asyncio.ensure_future(client.post("/v1/chat/completions", json=body | {"request_id": "dies"}))

            async def has_begun():
                reply = await client.get("/v1/requests/chatcmpl-dies")
                return reply.status_code == 200 and reply.json()["requests"][0]["num_output_tokens"] > 20

            await eventually_async(has_begun)
            os.kill(engine_of(server), signal.SIGKILL)
            return (await asked).json()

    got = asyncio.run(run())
    assert got["choices"][0]["message"] == want
    assert got["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_reasoning
    eventually(server.is_well, server.output)


def engine_of(server) -> int:
    return server.children()[f"{ENGINE_MODULE} 0 0"]


def test_a_server_that_knows_no_thinking_says_so(checkpoint):
    engine = EngineConfig(model=str(checkpoint), num_pages=64, max_num_seqs=2)
    with start_server(engine, ENGINE_MODULE, served_model_name=("tiny",), reasoning_parser="none") as server:
        assert server.post("/v1/requests/any/answer_now").status_code == 409
        assert (
            server.post("/v1/chat/completions", ASK | {"thinking_token_budget": 3, "max_tokens": 4}).status_code == 200
        )
