"""The flags that `simulate` and `plan` share: trace, step times, engines and policies."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.config.configs import EngineConfig, ServerConfig
from tokenmill.config.flags import add_config_file_flag, add_flags, build, check_names, read_given
from tokenmill.config.parse import settings
from tokenmill.config.parser import Parser, finite
from tokenmill.core.errors import InvalidConfig
from tokenmill.lab.bench.workload import (
    PROFILES,
    arrival_times,
    at_least,
    find_profile,
    read_scale,
)

if TYPE_CHECKING:
    from tokenmill.lab.simulate.simulation import Simulation
    from tokenmill.lab.simulate.traces import Arrival

# Flag and field of the scheduler's config; these take several names, with commas between them.
POLICIES = {
    "--policy": "policy",
    "--batch-policy": "batch_policy",
    "--admission": "admission",
    "--eviction-policy": "eviction_policy",
}
# What the engine's flags call them.
ENGINE_FIELDS = {name: name for name in POLICIES.values()} | {"policy": "scheduling_policy"}
ROUTER_FIELDS = ("data_parallel_size", "routing_policy")
PROFILE = "profile:"


def add_simulation_flags(parser: Parser, step_model: str) -> None:
    """Add all of them; `step_model` is the help of that flag."""
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help=f"Mooncake JSONL, Azure CSV, a step log, a server's log, or {PROFILE}NAME ({', '.join(PROFILES)})",
    )
    parser.add_argument("--step-model", required=True, metavar="FILE", help=step_model)
    group = parser.add_argument_group("trace")
    group.add_argument("--length-scale", default="1", metavar="X", help="shorten its lengths, e.g. 1/16")
    group.add_argument("--speed", type=finite, default=1.0, metavar="X", help="let requests come X times as fast")
    group.add_argument("--num-prompts", type=int, default=0, metavar="N", help="its first N requests (default: all)")
    group.add_argument("--block-size-of-trace", type=int, default=512, metavar="N", help="tokens of a hash's block")
    group.add_argument("--request-rate", type=finite, default=1.0, metavar="X", help="of a profile, per second")
    group = parser.add_argument_group("steps")
    group.add_argument(
        "--beyond", action="store_true", help="allow steps beyond those that the step model was fitted to"
    )
    group.add_argument("--no-noise", action="store_true", help="steps take exactly the time that the step model gives")
    group = parser.add_argument_group("policies; NAME,NAME and so on: each combination in turn")
    for flag, field in POLICIES.items():
        group.add_argument(flag, dest=f"{field}_names", metavar="NAMES", help=f"as serve's {_serve_flag(field)}")
    add_config_file_flag(parser)
    add_flags(parser, ServerConfig, "engines", ROUTER_FIELDS)
    names = [setting.name for setting in settings(EngineConfig) if setting.name not in ENGINE_FIELDS.values()]
    add_flags(parser, EngineConfig, "engine, as for serve", names)


def make_simulation(namespace: argparse.Namespace) -> Simulation:
    """Return the engines that the flags describe, with the first policies that are named.

    Raises:
        TokenMillError: a model or step model that cannot be read, or a flag that cannot be simulated.
    """
    from tokenmill.lab.simulate.simulation import Simulation, header_of
    from tokenmill.lab.simulate.step_model import read_step_model

    given = read_given(namespace, os.environ)
    check_names(given, (EngineConfig, ServerConfig))
    server, engine = build(ServerConfig, given).resolve(), build(EngineConfig, given)
    header = header_of(engine)
    simulation = Simulation(
        header=header,
        model=read_step_model(Path(namespace.step_model)),
        num_engines=server.data_parallel_size,
        routing_policy=server.routing_policy,
        seed=None if namespace.no_noise else engine.seed,
        is_bound=not namespace.beyond,
        step_log=Path(engine.step_log) if engine.step_log else None,
    )
    return simulation.with_policies({field: names[0] for field, names in policies_of(namespace).items() if names})


def policies_of(namespace: argparse.Namespace) -> Mapping[str, Sequence[str]]:
    """Return the names for each field of the scheduler's config; no names if the flag is not given."""
    texts = {field: getattr(namespace, f"{field}_names") or "" for field in POLICIES.values()}
    return {field: [name.strip() for name in text.split(",") if name.strip()] for field, text in texts.items()}


def read_arrivals(namespace: argparse.Namespace, vocab_size: int) -> list[Arrival]:
    """Read the requests of the trace, or of a profile.

    Raises:
        TokenMillError: the trace cannot be read; see `read_trace`.
        InvalidConfig: naming the flag.
    """
    from tokenmill.lab.simulate.traces import TraceOptions, read_trace

    at_least("--num-prompts", namespace.num_prompts, 0)
    at_least("--block-size-of-trace", namespace.block_size_of_trace, 1)
    if not (namespace.speed > 0.0 and namespace.request_rate > 0.0):
        raise InvalidConfig("--speed and --request-rate must be above 0")
    if namespace.trace.startswith(PROFILE):
        return _profile_arrivals(namespace, vocab_size)
    options = TraceOptions(
        vocab_size=vocab_size,
        block_size=namespace.block_size_of_trace,
        scale=read_scale(namespace.length_scale),
        speed=namespace.speed,
        limit=namespace.num_prompts,
    )
    return read_trace(Path(namespace.trace), options)


def check_plain(namespace: argparse.Namespace) -> None:
    """Refuse flags with which the run would not be the recorded one.

    Raises:
        InvalidConfig: naming the first such flag.
    """
    given = set(vars(namespace)) & {setting.name for setting in settings(EngineConfig)} | (
        set(vars(namespace)) & set(ROUTER_FIELDS)
    )
    names = [f"--{name.replace('_', '-')}" for name in sorted(given)]
    names += [flag for flag, field in POLICIES.items() if policies_of(namespace)[field]]
    if names or namespace.speed != 1.0 or namespace.length_scale != "1" or namespace.num_prompts:
        raise InvalidConfig(f"--step-model recorded is a log's own run: without {names[0] if names else 'trace flags'}")


def _profile_arrivals(namespace: argparse.Namespace, vocab_size: int) -> list[Arrival]:
    from tokenmill.lab.simulate.traces import Arrival, block_tokens

    profile, scale = find_profile(namespace.trace.removeprefix(PROFILE)), read_scale(namespace.length_scale)
    given = read_given(namespace, os.environ)
    seed, count = build(EngineConfig, given).seed, namespace.num_prompts or 1000
    source = random.Random(seed)
    times = arrival_times(count, namespace.request_rate * namespace.speed, profile.variation, seed)
    prompts, outputs = profile.input_len.scaled(scale), profile.output_len.scaled(scale)
    lengths = [(prompts.draw(source), outputs.draw(source)) for _ in range(count)]
    return [
        Arrival(seconds, block_tokens([number], prompt, prompt, vocab_size), output, str(number))
        for number, (seconds, (prompt, output)) in enumerate(zip(times, lengths, strict=True))
    ]


def _serve_flag(field: str) -> str:
    return f"--{ENGINE_FIELDS[field].replace('_', '-')}"
