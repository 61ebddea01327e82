"""Compare routing policies in a simulated fleet, and time one choice.

    python -m benchmarks.routing [--requests 6000]

Hit rates are shares of what an infinite cache that all engines share would supply. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

from benchmarks.fleet import AtRandom, Fleet, Outcome, PrefixAffinity, conversations, infinite_hit_rate, tool_agents

from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.part_messages import EngineReport
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.replicas.routing.policies import FewestInFlight, LeastCost, RoutingPolicy
from tokenmill.serving.replicas.routing.prefix_index import PrefixIndex
from tokenmill.serving.replicas.routing.router import Router

NUM_ENGINES = 8
NUM_TOKENS = 10_000
PAGE_SIZE = 16


class ShortestQueue(FewestInFlight):
    """As `FewestInFlight`, though caches are looked up as for the others."""

    reads_cache = True


def policies(seed: int) -> dict[str, Callable[[], RoutingPolicy]]:
    """Return the policies to compare."""
    return {
        "cost": LeastCost,
        "prefix affinity": PrefixAffinity,
        "shortest queue": ShortestQueue,
        "random": partial(AtRandom, seed),
    }


def compare(name: str, trace: list, seed: int) -> dict[str, dict[str, float]]:
    """Run one trace under each policy; prints a table."""
    best = infinite_hit_rate(trace)
    print(f"{name}: {len(trace)} requests, an infinite cache supplies {best:.1%} of their prompts")
    print(f"  {'policy':16} {'hits':>6} {'of it':>7} {'most/least':>11} {'first token p50':>16} {'p99':>8}")
    found = {}
    for policy, make in policies(seed).items():
        outcome: Outcome = Fleet(make(), NUM_ENGINES).run(trace)
        waits = outcome.first_token
        row = {
            "hit_rate": outcome.hit_rate,
            "of_infinite": outcome.hit_rate / best,
            "imbalance": outcome.imbalance,
            "ttft_p50": waits[len(waits) // 2],
            "ttft_p99": waits[len(waits) * 99 // 100],
        }
        found[policy] = {key: round(value, 4) for key, value in row.items()}
        print(
            f"  {policy:16} {row['hit_rate']:6.1%} {row['of_infinite']:7.1%} {row['imbalance']:11.2f} "
            f"{row['ttft_p50']:14.2f} s {row['ttft_p99']:6.2f} s"
        )
    return found


def time_choices(num_rounds: int, seed: int) -> dict[str, float]:
    """Microseconds of a choice alone, and of all that routing does for a request: naming its pages and entering it.

    Each round has new prompts, a third of them cached on one engine, a third to a half on all, a third nowhere. Other
    programs only ever make it slower, so the best median of all rounds counts.
    """
    rng = random.Random(seed)
    shared = [rng.randrange(50_000) for _ in range(NUM_TOKENS // 2)]
    medians = []
    for _ in range(num_rounds):
        router, index = Router(range(NUM_ENGINES), LeastCost()), PrefixIndex(PAGE_SIZE, "")
        router.begin_routing(PAGE_SIZE, "")
        choosing, routing = [], []
        for number in range(60):
            head = shared if number % 3 == 0 else []
            tokens = head + [rng.randrange(50_000) for _ in range(NUM_TOKENS - len(head))]
            request = AddRequest(id=str(number), prompt_token_ids=tokens, params=SamplingParams())
            names = index.names_of(request)
            for engine in [*range(NUM_ENGINES)][number % NUM_ENGINES if number % 3 else 0 : 1 + number % NUM_ENGINES]:
                if number % 3 < 2:
                    cached = names[: len(head) // PAGE_SIZE or len(names)]
                    router.apply_report(EngineReport(engine=engine, changes=[(True, cached)], num_taken=number))
            router.choose(request, names)
            began = time.perf_counter()
            router.choose(request, names)
            chosen = time.perf_counter()
            router.route(request)
            routed = time.perf_counter()
            if number % 4 == 3:
                router.ended([TokenOutput(request.id, [1], FinishReason.STOP)])
            choosing.append(chosen - began)
            routing.append(routed - chosen)
        medians.append((statistics.median(choosing) * 1e6, statistics.median(routing) * 1e6))
    choice, route = (min(column) for column in zip(*medians, strict=True))
    return {"choice_us": round(choice, 1), "route_us": round(route, 1)}


def main() -> None:
    """Print tables, and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=6000, help="of each trace, about")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng, result = random.Random(args.seed), {}
    traces = {
        "conversations": partial(conversations, rng, args.requests // 2, 10),
        "conversations, overload": partial(conversations, rng, args.requests // 2, 36),
        "tool agents": partial(tool_agents, rng, args.requests, 40),
        "tool agents, overload": partial(tool_agents, rng, args.requests, 110),
    }
    for name, make in traces.items():
        result[name] = compare(name, make(), args.seed)
    result["choice"] = time_choices(20, args.seed)
    choice = result["choice"]
    print(
        f"{NUM_ENGINES} engines, {NUM_TOKENS} tokens: {choice['choice_us']} us for a choice, "
        f"{choice['route_us']} us with the names of the pages and the books"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
