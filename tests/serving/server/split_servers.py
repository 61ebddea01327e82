"""A server that computes prompts, one that goes on from there, and the proxy in front of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.serving.server.running_proxy import start_proxy
from tests.serving.server.running_server import RunningServer, free_port, start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.server.process.launch import ENGINE_MODULE


@dataclass
class Split:
    prefill: RunningServer
    decode: RunningServer
    proxy: str
    log: Path

    def post(self, path: str, body: dict) -> httpx.Response:
        return httpx.post(self.proxy + path, json=body, timeout=60)


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
