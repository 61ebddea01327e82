"""`tokenmill simulate TRACE`: run the real scheduler, cache and router on a virtual clock, under several policies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenmill.cli.simulation_flags import (
    add_simulation_flags,
    check_plain,
    make_simulation,
    policies_of,
    read_arrivals,
)
from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig

RECORDED = "recorded"


def run(arguments: Sequence[str]) -> int:
    """Print the outcome of the requests, a column for each combination of policies; returns 0.

    Raises:
        TokenMillError: a trace, a model or a step model that cannot be read, or a flag that cannot be simulated.
    """
    namespace = make_parser().parse(arguments)
    from tokenmill.lab.simulate.lifetimes import side_by_side
    from tokenmill.lab.simulate.simulation import each_policy, run_recorded

    if namespace.step_model == RECORDED:
        check_plain(namespace)
        outcomes = [run_recorded(Path(namespace.trace))]
    else:
        simulation = make_simulation(namespace)
        arrivals = read_arrivals(namespace, simulation.header.vocab_size)
        choices = list(each_policy(policies_of(namespace)))
        if simulation.step_log is not None and len(choices) > 1:
            raise InvalidConfig("--step-log holds one run: name one policy, one batch policy and one admission")
        outcomes = [simulation.with_policies(fields).run(arrivals) for fields in choices]
    if namespace.json:
        for outcome in outcomes:
            print(json.dumps(outcome.summary()))
    else:
        print(side_by_side(outcomes))
    return 0


def make_parser() -> Parser:
    """Return the parser of `simulate`."""
    parser = Parser("simulate", "Simulate a trace with the real scheduler, cache and router, without a model.", "TRACE")
    add_simulation_flags(parser, f"a file of `tokenmill fit`, or `{RECORDED}`: a step log with its own times")
    parser.add_argument("--json", action="store_true", help="a JSON line for each column")
    return parser
