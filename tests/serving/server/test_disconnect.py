"""A client that goes away, however it does, leaves nothing behind in the engine."""

import asyncio
import json
import random
import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module", params=[0, 2], ids=["worker in the API process", "two workers"])
def slow_server(request, slow_model):
    with start_server(EngineConfig(model=str(slow_model)), tokenizer_workers=request.param) as server:
        yield server


def connect(server, **fields) -> socket.socket:
    body = json.dumps({"messages": MESSAGES} | fields).encode()
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_aborts_all_requests_of_the_call(slow_server, stream):
    connection = connect(slow_server, stream=stream, n=3)
    slow_server.wait_for(lambda: slow_server.metric("num_requests_running") == 3)
    connection.close()
    slow_server.wait_until_unused()


def test_leaving_at_any_moment_aborts(slow_server):
    for delay in (0, 0.001, 0.005, 0.02, 0.1):
        connection = connect(slow_server, stream=True)
        time.sleep(delay)
        connection.close()
    slow_server.wait_until_unused()


def test_one_that_never_reads_does_not_hold_up_the_others(slow_server):
    silent = connect(slow_server, stream=True, max_tokens=20)
    reply = slow_server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3})
    assert reply.status_code == 200
    slow_server.wait_until_unused()
    silent.close()


def test_random_disconnects_leave_the_kept_streams_whole(slow_server):
    seed = random.randrange(2**32)
    rng = random.Random(seed)

    async def run(client, length, leave_after):
        stream = await client.chat.completions.create(
            model="slow", messages=MESSAGES, max_tokens=length, stream=True, temperature=0
        )
        text, num_chunks = "", 0
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            num_chunks += 1
            if num_chunks == leave_after:
                await stream.close()
                return None
        return length, text

    async def run_all():
        async with slow_server.async_client as client:
            jobs = [(rng.randrange(1, 30), rng.randrange(1, 20) if rng.random() < 0.2 else None) for _ in range(32)]
            return await asyncio.gather(*(run(client, *job) for job in jobs))

    kept = [result for result in asyncio.run(run_all()) if result is not None]
    longest = slow_server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 30}).json()
    whole = longest["choices"][0]["message"]["content"]
    for length, text in kept:
        assert whole.startswith(text), f"seed {seed}, length {length}"
    slow_server.wait_until_unused()
