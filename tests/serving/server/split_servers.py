"""A server that computes prompts, one that goes on from there, and the proxy in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.serving.server.running_proxy import start_proxy
from tests.serving.server.running_server import RunningServer, free_port, start_server
from tests.serving.server.streams import answers
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.server.process.launch import ENGINE_MODULE

# As vLLM's proxies send it to whoever computes a prompt.
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PARSERS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


@dataclass
class Split:
    prefill: RunningServer
    decode: RunningServer
    proxy: str
    log: Path

    def post(self, path: str, body: dict) -> httpx.Response:
        return httpx.post(self.proxy + path, json=body, timeout=60)

    def check_streams(self, count: int) -> None:
        """Check that streams of every kind are those of one engine, and that nothing of them is left."""
        heard = asyncio.run(answers(self.proxy, count))
        alone = asyncio.run(answers(self.prefill.url, count))
        for number, (want, got) in enumerate(zip(alone, heard, strict=True)):
            assert got == want, f"stream {number}"
        for server in (self.prefill, self.decode):
            server.wait_until_unused()
            assert "Traceback" not in server.output()

    def check_pages(self, body: dict, num_tokens: int) -> None:
        """Check that this many tokens of a prompt come from the producer, and that it keeps no page for them."""
        reply = self.post("/v1/completions", body)
        assert num_cached(reply) == num_tokens
        assert choices(reply) == choices(self.prefill.post("/v1/completions", body))
        # The consumer has said that it is done: no lease has to run out for that.
        self.prefill.wait_until_unused()

    def kill_producer(self) -> None:
        """Kill the processes of the server that computes prompts, all at once."""
        pids = (self.prefill.api_pid, engine_of(self.prefill))
        self.prefill.process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def transfer_config(
    role: str,
    folder: Path,
    transport: str,
    port: int,
    own: int = 0,
    peer: int = 0,
    policy: str = "recompute",
    connector: str = "TokenMillConnector",
    **extra,
) -> str:
    """The value of --kv-transfer-config of one of a pair. `own`, `peer`: numbers of their unix sockets."""
    secret = folder / "secret"
    if not secret.exists():
        secret.touch(0o600)
        secret.write_text("a secret of these tests only")
    extra["secret_file"] = str(secret)
    if transport == "unix" and role != "kv_consumer":
        extra["socket"] = str(folder / f"pages-{own}.sock")
    if role != "kv_producer":
        extra["peers"] = [f"unix:{folder}/pages-{peer}.sock" if transport == "unix" else f"tcp://127.0.0.1:{port}"]
    config = {"kv_connector": connector, "kv_role": role, "kv_load_failure_policy": policy}
    config |= {"kv_port": port} if port else {}
    return json.dumps(config | {"kv_connector_extra_config": extra})


def engine_config(checkpoint: Path, kv_transfer_config: str | None = None, **fields) -> EngineConfig:
    fields = {"dtype": "bfloat16", "num_pages": 600, "max_num_seqs": 40, "max_num_batched_tokens": 64} | fields
    return EngineConfig(model=str(checkpoint), kv_transfer_config=kv_transfer_config, **fields)


@contextlib.contextmanager
def start_split(
    checkpoint: Path, folder: Path, transport: str, *, server: dict | None = None, decode: dict | None = None, **extra
) -> Iterator[Split]:
    """`server`: flags of both servers; `decode`: of the second one's engine; `extra`: see `transfer_config`."""
    port, server = free_port(), server or {}
    producer = transfer_config("kv_producer", folder, transport, port, **extra)
    consumer = transfer_config("kv_consumer", folder, transport, port, **extra)
    with (
        start_server(engine_config(checkpoint, producer), ENGINE_MODULE, **server) as one,
        start_server(engine_config(checkpoint, consumer, **decode or {}), ENGINE_MODULE, **server) as two,
        start_proxy([one.url], [two.url]) as proxy,
    ):
        yield Split(one, two, proxy.url, proxy.log)


def engine_of(server: RunningServer) -> int:
    """Return the process of a server's engine."""
    return next(pid for name, pid in server.children().items() if ENGINE_MODULE in name)


def prompt_of(seed: int, length: int = 100) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=length)


def fresh_prompt(length: int = 100) -> list[int]:
    """One that nobody has cached."""
    seed = random.randrange(1 << 32)
    print(f"prompt {seed}")
    return prompt_of(seed, length)


def body_of(prompt: list[int], **fields) -> dict:
    return {"prompt": prompt, "max_tokens": 20, "temperature": 0.0, "ignore_eos": True} | fields


def choices(reply: httpx.Response) -> list[dict]:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def num_cached(reply: httpx.Response) -> int:
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def computed_prompt(producer: RunningServer, prompt: list[int]) -> dict:
    """Return a producer's answer to a proxy."""
    reply = producer.post("/v1/completions", body_of(prompt, max_tokens=1, kv_transfer_params=ASKED))
    assert reply.status_code == 200, reply.text
    return reply.json()["kv_transfer_params"]
