"""Compare policies of eviction on made traces: the share of tokens that are computed, of 3,000 requests.

    python benchmarks/eviction.py [--pages 1000,2500] [--requests 3000] [--seed 1]

Pages of one token. `tokenmill replay LOG --eviction-policy NAME` compares them on what a server really got.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator

import numpy as np

from tokenmill.core.request import CacheKey
from tokenmill.engine.kv.eviction import EVICTION_POLICIES
from tokenmill.engine.kv.radix_tree import RadixTree

Trace = Callable[[random.Random, int], Iterator[list[int]]]
KEY = CacheKey("model")


def prefixes(rng: random.Random, count: int) -> Iterator[list[int]]:
    """Yield prompts: 7 of 10 begin with one of 60 prefixes of 5 to 199 tokens, by Zipf's law; the others are new."""
    lengths = [rng.randrange(5, 200) for _ in range(60)]
    weights = [1 / (rank + 1) ** 0.9 for rank in range(60)]
    for number in range(count):
        if rng.random() < 0.3:
            yield [10**6 + 300 * number + i for i in range(20)]
            continue
        prefix = rng.choices(range(60), weights)[0]
        yield [1000 * prefix + i for i in range(lengths[prefix])] + [2 * 10**7 + 10 * number + i for i in range(5)]


def conversations(rng: random.Random, count: int) -> Iterator[list[int]]:
    """Yield the turns of 40 conversations at a time, in any order; each ends after 3 to 12."""
    live: list[tuple[int, list[int], list[None]]] = []
    names = itertools.count()
    for _ in range(count):
        if len(live) < 40:
            live.append((next(names), [], [None] * rng.randrange(3, 13)))
        talk = rng.choice(live)
        name, tokens, left = talk
        tokens += [10_000 * name + len(tokens) + i for i in range(rng.randrange(4, 20))]
        yield [9**7 + i for i in range(8)] + tokens
        left.pop()
        if not left:
            live.remove(talk)


def share_computed(name: str, trace: Trace, pages: int, count: int, seed: int) -> float:
    """Return the share of the prompts' tokens that are not found, with a cache of so many pages."""
    tree, ids, computed, total = RadixTree(1, policy=EVICTION_POLICIES[name]()), itertools.count(1), 0, 0
    for step, prompt in enumerate(trace(random.Random(seed), count)):
        tokens = np.array(prompt, dtype=np.int32)
        match = tree.match(KEY, tokens, step)
        tree.lock(match.node)
        tree.count_use(match.node)
        rest = tokens[match.num_tokens :]
        node, _ = tree.extend(match.node, rest, np.fromiter(itertools.islice(ids, len(rest)), np.int32, len(rest)))
        if node is not match.node:
            tree.lock(node)
            tree.unlock(match.node, step)
        tree.unlock(node, step)
        tree.evict(max(0, tree.num_evictable - pages))
        computed, total = computed + len(rest), total + len(tokens)
    return computed / total


def main() -> None:
    """Print a line for each trace and size, and all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pages", default="1000,2500")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows = []
    for trace, pages in itertools.product((prefixes, conversations), map(int, options.pages.split(","))):
        shares = {
            name: round(share_computed(name, trace, pages, options.requests, options.seed), 3)
            for name in EVICTION_POLICIES
        }
        print(trace.__name__, pages, shares, file=sys.stderr)
        rows.append({"trace": trace.__name__, "pages": pages, "computed": shares})
    print(json.dumps({"benchmark": "eviction", **vars(options), "rows": rows}))


if __name__ == "__main__":
    main()
