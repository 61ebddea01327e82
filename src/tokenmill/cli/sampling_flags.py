"""Sampling parameters as flags of the client commands; the server's or the engine's defaults hold for the rest."""

from __future__ import annotations

import argparse
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from tokenmill.config.parser import Parser
from tokenmill.core.sampling_params import SamplingParams

# Name, type and help of each parameter that has a description.
_FLAGS: tuple[tuple[str, type, str], ...] = tuple(
    (name, (get_args(own_type) or (own_type,))[0], meta.description)
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    if get_origin(hint) is Annotated
    for own_type, meta in [get_args(hint)]
)


def add_sampling_flags(parser: Parser, without: str = "") -> None:
    """Add the flags, except one that the engine has too; flags that are not given leave no attribute."""
    group = parser.add_argument_group("sampling")
    for name, kind, text in _FLAGS:
        if name == without:
            continue
        how: dict[str, Any] = {"action": "append"} if name == "stop" else {}
        metavar = {int: "N", float: "X", str: "TEXT"}[kind]
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=name, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text, **how)


def sampling_fields(namespace: argparse.Namespace, without: str = "") -> dict[str, Any]:
    """Return the parameters that were given, by the names that requests use."""
    return {name: getattr(namespace, name) for name, _, _ in _FLAGS if name in namespace and name != without}
