"""The address of the deployment for Ray Serve, as users write it: `serve run tokenmill.ray:app`."""

from __future__ import annotations

from tokenmill.serving import ray as deployment
from tokenmill.serving.ray import PrefixRouter, Replica, build_app

__all__ = ["PrefixRouter", "Replica", "build_app"]


def __getattr__(name: str) -> object:
    return getattr(deployment, name)
