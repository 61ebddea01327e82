"""`tokenmill plan TRACE --slo ...`: find the load that engines carry within limits, or the engines for a load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tokenmill.cli.simulation_flags import add_simulation_flags, make_simulation, policies_of, read_arrivals
from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.lab.bench.plot import Line, Panel, check_plot, draw
from tokenmill.lab.bench.workload import at_least

if TYPE_CHECKING:
    from tokenmill.lab.simulate.capacity import Limit, Trial


def run(arguments: Sequence[str]) -> int:
    """Simulate more and less load, or engines, until the limits are just kept; returns 0.

    Raises:
        TokenMillError: no run keeps the limits, or a flag is wrong.
    """
    namespace = make_parser().parse(arguments)
    check_plot(namespace.plot)
    at_least("--most-engines", namespace.most_engines, 1)
    from tokenmill.lab.simulate.capacity import fewest_engines, most_load, parse_limits, trials_table

    limits = parse_limits(namespace.slo)
    if any(len(names) > 1 for names in policies_of(namespace).values()):
        raise InvalidConfig("plan takes one policy of a kind; simulate compares several")
    simulation = make_simulation(namespace)
    if simulation.step_log is not None:
        raise InvalidConfig("plan simulates many runs and leaves no --step-log; simulate does, of one")
    arrivals = read_arrivals(namespace, simulation.header.vocab_size)
    if len(arrivals) < 2:
        raise InvalidConfig("a plan needs a trace of two requests or more: one has no rate")
    if namespace.find == "engines":
        trials = fewest_engines(simulation, arrivals, limits, namespace.most_engines)
        found = min((one for one in trials if one.is_kept), key=lambda one: one.num_engines)
        sentence = f"{found.rate:.3f} requests/s need {found.num_engines} engines"
    else:
        trials = most_load(simulation, arrivals, limits)
        found = max((one for one in trials if one.is_kept), key=lambda one: one.speed)
        sentence = f"{found.num_engines} engines carry {found.rate:.3f} requests/s, {found.speed:.3g} times the trace's"
    if namespace.plot is not None:
        _draw(namespace.plot, trials, limits, namespace.find, sentence)
    if namespace.json:
        document = {"found": msgspec.structs.asdict(found), "trials": [msgspec.structs.asdict(one) for one in trials]}
        print(json.dumps(document))
    else:
        print(trials_table(trials, limits), "", f"{', '.join(map(str, limits))}: {sentence}", sep="\n")
    return 0


def make_parser() -> Parser:
    """Return the parser of `plan`."""
    parser = Parser(
        "plan", "Find the load that engines carry within limits, or the engines that a load needs.", "TRACE"
    )
    group = parser.add_argument_group("plan")
    group.add_argument(
        "--slo", required=True, metavar="LIMITS", help="e.g. ttft_p99<1s,itl_p99<100ms; also e2e, p50, p90, mean"
    )
    choices = ("load", "engines")
    group.add_argument(
        "--find",
        choices=choices,
        default="load",
        metavar="{" + ",".join(choices) + "}",
        help="the most load for the engines, or the fewest engines for the load (default: load)",
    )
    group.add_argument("--most-engines", type=int, default=64, metavar="N", help="engines at most (default: 64)")
    group.add_argument("--json", action="store_true", help="every trial, as one JSON line")
    group.add_argument("--plot", metavar="FILE", help="draw the trials, e.g. out.png (needs matplotlib)")
    add_simulation_flags(parser, "a file of `tokenmill fit` or `tokenmill bench steps`")
    return parser


def _draw(path: str, trials: Sequence[Trial], limits: Sequence[Limit], find: str, sentence: str) -> None:
    """Draw a panel for each limit: the figure by load or engines."""
    panels = []
    x = [float(one.num_engines) if find == "engines" else one.rate for one in trials]
    for limit in limits:
        y = [(one.summary[limit.metric] or {}).get(limit.figure, 0.0) * 1e3 for one in trials]
        bound = Line("limit", x, [limit.seconds * 1e3] * len(x))
        label = "engines" if find == "engines" else "requests per second"
        name = f"{limit.metric} {limit.figure}"
        panels.append(Panel(name, label, "milliseconds", [Line(name, x, y), bound]))
    try:
        draw(path, panels, sentence)
    except OSError as error:
        raise TokenMillError(f"{error.filename}: {error.strerror}") from None
