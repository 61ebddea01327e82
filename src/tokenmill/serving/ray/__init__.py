"""TokenMill as a deployment of Ray Serve, on one machine or many.

    serve run tokenmill.ray:app                                                  (flags as TOKENMILL_* variables)
    serve run tokenmill.ray:build_app model=/models/qwen3 num_replicas=2
    serve run deploy/ray.yaml

Each replica is an actor that runs what `tokenmill serve` runs, but for the listener: the app answers Ray's proxies.
"""

from __future__ import annotations

from tokenmill.serving.ray.deployment import Replica, build_app
from tokenmill.serving.ray.prefix_router import PrefixRouter

__all__ = ["PrefixRouter", "Replica", "build_app"]


def __getattr__(name: str) -> object:
    # Not at import: what the environment says of flags is read, and refused, only where the app is asked for.
    if name == "app":
        return build_app({})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
