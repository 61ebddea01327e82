"""A server inside a process of others, without Ray: what a replica starts, how it is doing, and what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.ray.fleet import until
from tests.serving.server.running_server import children_of, is_alive
from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.core.errors import EngineDead, TokenMillError
from tokenmill.serving.server.http.application import Application
from tokenmill.serving.server.process.launch import prepared

ENGINE = EngineConfig(num_pages=64, max_num_seqs=4, max_model_len=256)


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # A socket's path is short.
    with tempfile.TemporaryDirectory(prefix="tm-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        assert list(Path(folder).iterdir()) == []
    assert engines() == []


def engines() -> list[int]:
    return [
        pid
        for pid, command in children_of(os.getpid()).items()
        if "tokenmill.startup.assembly.engine_process" in command
    ]


@contextlib.asynccontextmanager
async def embedded(**server) -> AsyncIterator[tuple]:
    from tokenmill.serving.ray.embedded import EmbeddedServer

    inner = EmbeddedServer(prepared(ENGINE, ServerConfig(**server)))
    app = await inner.begin()
    try:
        yield inner, app
    finally:
        await inner.end()


async def complete(app: Application) -> int:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica", timeout=60) as client:
        body = {"prompt": "Once upon a time", "max_tokens": 3}
        return (await client.post("/v1/completions", json=body)).status_code


def test_an_engine_that_is_started_again_is_no_reason_to_replace_the_replica() -> None:
    async def run() -> None:
        async with embedded() as (inner, app):
            assert await complete(app) == 200
            (engine,) = engines()
            os.kill(engine, signal.SIGKILL)
            await until(lambda: not is_alive(engine))
            # It waits for the engine that is being started.
            answer = asyncio.ensure_future(complete(app))
            while not answer.done():
                assert inner.failure is None
                await asyncio.sleep(0.02)
            assert await answer == 200
            assert engines() != [engine]
            await until(lambda: inner.load["requests_open"] == 0 and inner.load["pages"] == ENGINE.num_pages)

    asyncio.run(run())


def test_a_replica_whose_engine_is_not_started_again_says_so() -> None:
    async def run() -> None:
        async with embedded(max_restarts=0) as (inner, app):
            assert inner.failure is None
            (engine,) = engines()
            os.kill(engine, signal.SIGKILL)
            await until(lambda: inner.failure is not None)
            assert "was killed by SIGKILL" in inner.failure
            assert await complete(app) == 503

    asyncio.run(run())


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    from tokenmill.serving.ray.embedded import EmbeddedServer

    (tmp_path / "config.json").write_text("{}")

    async def run() -> None:
        inner = EmbeddedServer(prepared(EngineConfig(model=str(tmp_path)), ServerConfig()))
        with pytest.raises(EngineDead, match=r"tokenizer\.json"):
            await inner.begin()

    asyncio.run(run())
    with pytest.raises(TokenMillError, match="chat template"):
        asyncio.run(_make(EngineConfig(), ServerConfig(chat_template="{{")))


async def _make(engine: EngineConfig, server: ServerConfig) -> object:
    from tokenmill.serving.ray.embedded import EmbeddedServer

    return EmbeddedServer(prepared(engine, server))
