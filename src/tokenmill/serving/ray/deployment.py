"""Define the deployment: each replica is an actor that runs the parts of a server and gives Ray their app."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.types import ASGIApp

from ray import serve
from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.config.flags import ENV_PREFIX, Given, build, check_names
from tokenmill.core.errors import InvalidConfig
from tokenmill.serving.ray.embedded import EmbeddedServer
from tokenmill.serving.ray.prefix_router import PrefixRouter
from tokenmill.serving.server.process.launch import prepared

NAME = "TokenMill"
# What of Ray's own can be said beside the flags of `serve`; all else stands in a config file of Ray's.
RAY_ARGUMENTS = ("num_replicas", "max_replicas", "target_ongoing_requests", "num_cpus", "num_gpus")
# Ray's proxies listen, not we.
LISTENER_FLAGS = ("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "root_path")
# More than run at a time, so that the scheduler has some to choose from; autoscaling comes before that.
ONGOING_PER_ROW = 2
TARGET_SHARE = 0.8
# What a replica has to end its parts in, once its streams have ended or lost their time.
END_SECONDS = 5.0


@serve.ingress()
class Replica:
    """A replica of the deployment: one server in one actor."""

    def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        self._configs = engine, server
        self._server: EmbeddedServer | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        self._server = EmbeddedServer(prepared(*self._configs))
        return await self._server.begin()

    async def check_health(self) -> None:
        """Raise if this replica should be replaced; an engine that is being started again is no reason."""
        failure = None if self._server is None else self._server.failure
        if failure is not None:
            raise RuntimeError(failure)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the load of this replica."""
        return {} if self._server is None else self._server.load

    async def __del__(self) -> None:
        if self._server is not None:
            await self._server.end()


def build_app(args: Mapping[str, Any]) -> Application:
    """Return the application, as `serve run` and Ray's config files build it.

    Args:
        args: flags of `tokenmill serve` as keys (`model`, `max-model-len` ...), which win over TOKENMILL_* variables,
            and `RAY_ARGUMENTS`.

    Raises:
        InvalidConfig: an unknown key, a value that cannot work, or a flag of the listener.
    """
    engine, server = _configs({key: value for key, value in args.items() if key not in RAY_ARGUMENTS})
    ray = {key: _number(key, args[key]) for key in RAY_ARGUMENTS if key in args}
    resources = {key: ray[key] for key in ("num_cpus", "num_gpus") if key in ray}
    if engine.num_threads is None and ray.get("num_cpus", 0) >= 1:
        engine = replace(engine, num_threads=int(ray["num_cpus"]))
    rows = engine.max_num_seqs
    return serve.deployment(
        Replica,
        name=NAME,
        **_replicas(ray, rows),
        max_ongoing_requests=ONGOING_PER_ROW * rows,
        graceful_shutdown_timeout_s=server.shutdown_timeout + END_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        ray_actor_options=resources,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    ).bind(engine, server)


def _configs(args: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    said = {ENV_PREFIX + key.upper().replace("-", "_") for key in args}
    environment = {name: value for name, value in os.environ.items() if name not in said}
    given = Given({}, environment, args, "the arguments of build_app")
    check_names(given, (EngineConfig, ServerConfig))
    engine, server = build(EngineConfig, given).resolve(), build(ServerConfig, given).resolve()
    usual = ServerConfig()
    ours = [name for name in LISTENER_FLAGS if getattr(server, name) != getattr(usual, name)]
    if ours:
        raise InvalidConfig(f"Ray's proxies listen, so {', '.join(ours)} must be said to Ray (http_options)")
    return engine, server


def _replicas(ray: Mapping[str, float], rows: int) -> dict[str, Any]:
    """Return the number of replicas, or the autoscaling between a least and a most by open requests."""
    least = int(ray.get("num_replicas", 1))
    if "max_replicas" not in ray:
        return {"num_replicas": least}
    target = ray.get("target_ongoing_requests", math.ceil(TARGET_SHARE * rows))
    most = int(ray["max_replicas"])
    return {
        "autoscaling_config": AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=target)
    }


def _number(key: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise InvalidConfig(f"the arguments of build_app: {key}: {value!r} is not a number of 0 or more")
    return number
