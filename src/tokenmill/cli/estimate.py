"""`tokenmill estimate MODEL`: report what a model would take on this machine, before it is downloaded or loaded."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from tokenmill.config.configs import EngineConfig
from tokenmill.config.flags import add_config_file_flag, add_flags, build, check_names, read_given
from tokenmill.config.parse import parse_size
from tokenmill.config.parser import Parser


def run(arguments: Sequence[str]) -> int:
    """Print the estimate; returns 0.

    Raises:
        TokenMillError: there is no such model, or it cannot be served.
    """
    namespace = make_parser().parse(arguments)
    given = read_given(namespace, os.environ)
    check_names(given, (EngineConfig,))
    config = build(EngineConfig, given)
    if namespace.positional_model is not None:
        config = dataclasses.replace(config, model=namespace.positional_model)
    memory, bandwidth = (parse_size(text) if text else None for text in (namespace.memory, namespace.bandwidth))
    from tokenmill.startup.sizing.estimate import Target, estimate

    print(estimate(config.resolve(), Target(memory, bandwidth)))
    return 0


def make_parser() -> Parser:
    """Return the parser of `estimate`."""
    parser = Parser(
        "estimate", "Estimate a model's memory and speed on this machine, from its config and headers.", "[MODEL]"
    )
    parser.add_argument(
        "positional_model",
        nargs="?",
        metavar="MODEL",
        help="folder, config.json, .gguf file or hub id (default: the bundled demo model)",
    )
    group = parser.add_argument_group("another machine")
    group.add_argument("--memory", metavar="SIZE", help="free memory, e.g. 16g (default: what is free here)")
    group.add_argument("--bandwidth", metavar="SIZE", help="memory read per second, e.g. 50g (default: measured)")
    add_config_file_flag(parser)
    add_flags(parser, EngineConfig, "engine, as for serve")
    return parser
