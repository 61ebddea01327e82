"""A real `tokenmill serve` process over a tiny checkpoint, and clients that stream from it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.eventually import patience
from tests.serving.server.running_server import JSON, REPOSITORY, RunningServer, serving

MODEL_NAME = "tiny"
MAX_MODEL_LEN = 256
COMMON_FLAGS = ("--max-model-len", str(MAX_MODEL_LEN), "--served-model-name", MODEL_NAME)

# 20 pages hold one full request and a quarter; chunks of at most 32 tokens; everything competes. All servers have pages
# of one size: the order of sums follows from it.
TIGHT = ("--num-pages", "20", "--max-num-seqs", "12", "--max-num-batched-tokens", "32")


COMMAND = (sys.executable, "-m", "tokenmill")


def serve(
    model: Path, *flags: str, program: Sequence[str] = COMMAND, folder: Path = REPOSITORY
) -> contextlib.AbstractContextManager[RunningServer]:
    """`tokenmill serve MODEL FLAGS`, called in a folder, ready; ended by SIGINT, which must take it down cleanly."""
    return serving([*program, "serve", str(model), *COMMON_FLAGS, *flags], folder)


@dataclass
class Answer:
    """A client's part of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[Answer]:
    """Stream a completion or a chat (whichever the body is for); yields the answer so far after each chunk."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer, done = Answer(), False
    body = {"model": MODEL_NAME, "stream": True, "return_token_ids": True, **body}
    async with client.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200, (await reply.aread(), body)
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                assert not line or line.startswith(":"), "a sign of life, where an answer is silent for long"
                continue
            assert not done, "nothing comes after [DONE]"
            if line == "data: [DONE]":
                done = True
                continue
            for choice in msgspec.json.decode(line[6:])["choices"]:
                assert answer.finish_reason is None, "nothing comes after the finish reason"
                answer.text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                answer.token_ids += choice.get("token_ids") or []
                answer.finish_reason = choice["finish_reason"]
            yield answer
    assert done, "the stream ends with [DONE]"


async def complete(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Stream to the end."""
    answer = Answer()
    async for chunk in stream(client, body):
        answer = chunk
    return answer


def open_client(server: RunningServer) -> httpx.AsyncClient:
    """A client without limits of its own."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=patience(), limits=limits, headers=JSON)
