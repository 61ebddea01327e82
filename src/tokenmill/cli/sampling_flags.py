"""Sampling parameters as flags of the client commands; the server's or the engine's defaults hold for the rest."""

from __future__ import annotations

import argparse
from typing import Any

from tokenmill.cli.parser import Parser

_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "tokens of the answer at most"),
    ("temperature", float, "0: always the most likely token"),
    ("top_p", float, "sample from the most likely tokens that hold this share of probability"),
    ("top_k", int, "sample from this many most likely tokens"),
    ("min_p", float, "drop tokens less likely than this share of the most likely one"),
    ("presence_penalty", float, "make tokens that occurred less likely"),
    ("frequency_penalty", float, "make tokens less likely each time they occur"),
    ("repetition_penalty", float, "scale down tokens that occurred, in prompt or answer"),
    ("seed", int, "the same seed gives the same answer"),
    ("stop", str, "end before this text; may be repeated"),
)


def add_sampling_flags(parser: Parser, without: str = "") -> None:
    """Add the flags, but for one that the engine has too; those that are not given leave no attribute."""
    group = parser.add_argument_group("sampling")
    for name, kind, text in _FLAGS:
        if name == without:
            continue
        how: dict[str, Any] = {"action": "append"} if name == "stop" else {}
        metavar = {int: "N", float: "X", str: "TEXT"}[kind]
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=name, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=text, **how)


def sampling_fields(namespace: argparse.Namespace, without: str = "") -> dict[str, Any]:
    """The parameters that were given, by the names that requests use."""
    return {name: getattr(namespace, name) for name, _, _ in _FLAGS if name in namespace and name != without}
