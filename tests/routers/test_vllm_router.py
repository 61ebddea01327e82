"""vLLM's router, as its wheel installs it, in front of two of our servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.eventually import eventually
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.running_server import JSON, RunningServer, free_port, start_server
from tokenmill.config.configs import EngineConfig

ROUTER = Path(os.environ.get("VLLM_ROUTER") or Path(sys.prefix, "routers", "bin", "vllm-router"))
NUM_REQUESTS = 32
MODEL = "echo"

pytestmark = pytest.mark.skipif(not ROUTER.exists(), reason="`make routers` installs what this needs")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[RunningServer]]:
    """Two whose engines repeat the prompt, 50 tokens a second."""
    config = {"stub": {"step_seconds": 0.02}}
    model = write_folder(tmp_path / MODEL, byte_level_tokenizer(), config=config)
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(start_server(EngineConfig(model=str(model)), shutdown_timeout=60.0)) for _ in range(2)
        ]


@contextlib.contextmanager
def routed(servers: list[RunningServer], policy: str) -> Iterator[str]:
    """The address of a router that has taken both servers in."""
    port, metrics = free_port(), free_port()
    command = [str(ROUTER), "--port", str(port), "--prometheus-port", str(metrics), "--policy", policy]
    command += ["--worker-startup-check-interval", "1", "--worker-urls", *(server.url for server in servers)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"

            def text() -> str:
                log.seek(0)
                return log.read()

            def answers() -> bool:
                assert process.poll() is None, text()
                return _answers(f"{url}/v1/models")

            eventually(answers, text)
            yield url
        finally:
            process.kill()
            process.wait(10)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


async def echo(client: httpx.AsyncClient, prompt: str, is_stream: bool) -> str:
    """The beginning of what comes back for a prompt: the prompt, as its tokens are no more than its characters."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": len(prompt), "stream": is_stream}
    if not is_stream:
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"][: len(prompt)]
    text, is_done = "", False
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                text += msgspec.json.decode(line[6:])["choices"][0]["text"]
    assert is_done
    return text[: len(prompt)]


def prompts(chance: random.Random) -> list[str]:
    return ["".join(chance.choices("abcdefgh ", k=chance.randrange(20, 60))) for _ in range(NUM_REQUESTS)]


@pytest.mark.parametrize("policy", ["round_robin", "cache_aware"])
def test_all_get_their_own_answer_and_the_end_of_a_server_breaks_none(
    servers: list[RunningServer], policy: str
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)

    async def run(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60.0, headers=JSON) as client:

            async def answers(texts: list[str]) -> list[str]:
                return await asyncio.gather(*(echo(client, text, i % 2 == 0) for i, text in enumerate(texts)))

            first, during, after = prompts(chance), prompts(chance), prompts(chance)
            assert await answers(first) == first
            counts = [server.metric("request_success_total") for server in servers]
            assert sum(counts) == NUM_REQUESTS and min(counts) > 0, counts
            # Both have something to do when one of them is told to end: it ends its streams first.
            open_ones = asyncio.ensure_future(answers(during))
            await asyncio.to_thread(
                servers[0].wait_for, lambda: all(server.metric("num_requests_running") > 0 for server in servers)
            )
            servers[0].process.send_signal(signal.SIGINT)
            assert await open_ones == during
            await asyncio.to_thread(servers[0].process.wait, 30)
            assert await answers(after) == after

    with routed(servers, policy) as url:
        asyncio.run(run(url))
