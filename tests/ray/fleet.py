"""Deploy replicas in Ray Serve, look at them, kill them and talk to them, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import yaml

from tests.eventually import eventually, eventually_async
from tests.serving.server.running_server import REPOSITORY

APP, DEPLOYMENT = "tokenmill", "TokenMill"
WAIT_SECONDS = 120.0


class Fleet:
    """The replicas of one application."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def deploy(self, num_replicas: int | None = None, **how: Any) -> None:
        """Deploy as `serve run deploy/ray.yaml` does, with another number of replicas; return at once.

        Args:
            how: options of Ray's for the deployment.
        """
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        config = yaml.safe_load((REPOSITORY / "deploy" / "ray.yaml").read_text())
        config["http_options"]["port"] = self.port
        how |= {"name": DEPLOYMENT} | ({} if num_replicas is None else {"num_replicas": num_replicas})
        config["applications"][0]["deployments"] = [how]
        client = _get_global_client()
        assert client is not None
        client.deploy_apps(ServeDeploySchema(**config))

    def wait_until_running(self, num_replicas: int) -> None:
        """Until so many replicas run and take requests, and none starts or stops."""

        def is_so() -> bool:
            # The controller notices a death late, and the actor of a replica is there before it runs.
            if self.states() != {"RUNNING": num_replicas} or len(self.replicas()) != num_replicas:
                return False
            for _ in range(4 * num_replicas):
                self.post(json={"prompt": "Hello", "max_tokens": 1}).raise_for_status()
            return all(one["prefix_queries"] for one in self.stats().values())

        wait_for(is_so, self.states)

    def states(self) -> dict[str, int]:
        from ray import serve

        found = serve.status().applications[APP].deployments
        return dict(found[DEPLOYMENT].replica_states) if found else {}

    def replicas(self) -> dict[str, Any]:
        """The actors of the replicas by name."""
        import ray

        names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
        return {name: ray.get_actor(name, "serve") for name in names if name.startswith(f"SERVE_REPLICA::{APP}#")}

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the reports of the replicas to the routers, by name."""
        import ray

        return {
            name: ray.get(actor.record_routing_stats.remote(), timeout=30) for name, actor in self.replicas().items()
        }

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=120.0, limits=limits)

    def post(self, **how: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", timeout=60.0, **how)


class Stream:
    """One stream of a completion, read to its end or to where it breaks."""

    def __init__(self, client: httpx.AsyncClient, max_tokens: int, headers: dict[str, str] | None = None) -> None:
        self.num_tokens = 0
        self.is_whole = False
        body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self.task = asyncio.ensure_future(self._read(client, body | {"return_token_ids": True}, headers or {}))

    async def _read(self, client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> None:
        try:
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
                async for line in reply.aiter_lines():
                    if line == "data: [DONE]":
                        self.is_whole = self.num_tokens == body["max_tokens"]
                    elif line.startswith("data: "):
                        message = msgspec.json.decode(line[6:])
                        for choice in message.get("choices", ()):
                            self.num_tokens += len(choice.get("token_ids") or ())
        except httpx.TransportError:
            self.is_whole = False


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition while streams go on."""
    await eventually_async(condition, seconds=WAIT_SECONDS)


def wait_for(condition: Callable[[], bool], say: Callable[[], object]) -> None:
    eventually(condition, say, seconds=WAIT_SECONDS)
