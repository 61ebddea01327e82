"""Measure the drafters that need no model: accepted tokens a step, and microseconds a call.

    python benchmarks/drafters.py [--limit 16] [--repeats 3]

Four texts in tokens of the demo model: this repository's source copied with 5% edits, JSON with repeated keys, source
code, random tokens. A request is given the first part of a text and takes the rest step by step: the drafts that are
right and one token more. `exact` is suffix decoding with a count for every suffix of at most 24 tokens, as in the paper
(arXiv 2411.04975); it is slow, and here to compare its drafts. Prints a table and, last, one JSON document. A call is
timed as the engine makes it, but for the first one of a request, which reads its prompt: that has a row of its own.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import tokenmill
from tokenmill.core.request import Request
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.demo import demo_model_path
from tokenmill.engine.speculation.drafts import Draft, TextDrafter
from tokenmill.engine.speculation.speculation import NgramDrafter
from tokenmill.engine.speculation.suffix import SuffixDrafter

Tokens = list[int]
# A prompt and what is said then.
Text = tuple[Tokens, Tokens]
DEPTH = 24


class CountingTree:
    """Counts of each sequence of at most 24 tokens, and of what followed."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], int] = {}
        self.children: dict[tuple[int, ...], list[int]] = {}

    def add(self, tokens: Tokens, start: int) -> None:
        """Count what ends at `start` or later."""
        for end in range(start + 1, len(tokens) + 1):
            for length in range(1, min(DEPTH, end) + 1):
                key = tuple(tokens[end - length : end])
                self.counts[key] = self.counts.get(key, 0) + 1
                if self.counts[key] == 1:
                    self.children.setdefault(key[:-1], []).append(key[-1])

    def speculate(self, end: Tokens, limit: int) -> tuple[float, Tokens, list[float]]:
        """The draft of the best score, of equals the one after the longest match; and its score first."""
        best: tuple[float, Tokens, list[float]] = 0.0, [], []
        for length in range(1, len(end)):
            node = tuple(end[-length:])
            if node not in self.counts:
                break
            survival, tokens, probabilities, score = 1.0, list[int](), list[float](), 0.0
            while len(tokens) < min(limit, length) and (children := self.children.get(node)) and len(node) < DEPTH:
                token = max(children, key=lambda child: self.counts[(*node, child)])
                probability = self.counts[(*node, token)] / self.counts[node]
                survival *= probability
                if survival < 0.1:
                    break
                score += survival
                tokens.append(token)
                probabilities.append(probability)
                node = (*node, token)
            if score >= best[0]:
                best = score, tokens, probabilities
        return best


class ExactSuffix:
    """Suffix decoding by the letter."""

    def __init__(self) -> None:
        self.finished = CountingTree()
        self.trees: dict[str, CountingTree] = {}
        self.known: dict[str, int] = {}

    def propose(self, request: Request, limit: int) -> Draft:
        """See `TextDrafter`."""
        tree, tokens = self.trees.setdefault(request.id, CountingTree()), request.token_ids.tolist()
        tree.add(tokens, self.known.get(request.id, 0))
        self.known[request.id] = len(tokens)
        found = [source.speculate(tokens[-DEPTH:], limit) for source in (tree, self.finished)]
        _, drafted, probabilities = max(found, key=lambda one: one[0])
        return Draft(np.array(drafted, dtype=np.int32), np.array(probabilities, dtype=np.float32))

    def forget_request(self, request: Request) -> None:
        """See `TextDrafter`."""
        self.finished.add(request.token_ids[request.num_prompt_tokens :].tolist(), 0)


DRAFTERS: dict[str, Callable[[], TextDrafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter, "exact": ExactSuffix}


def main() -> None:
    """Measure everything and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=16, help="draft tokens a step at most")
    parser.add_argument("--repeats", type=int, default=3, help="runs; times are of the fastest, with the spread")
    arguments = parser.parse_args()
    report: dict[str, object] = {"machine": platform.machine(), "python": platform.python_version()}
    report |= {"limit": arguments.limit, "repeats": arguments.repeats}
    for text, pairs in make_texts(random.Random(1)).items():
        for name, make in DRAFTERS.items():
            runs = [drive(make(), pairs, arguments.limit) for _ in range(arguments.repeats)]
            report[f"{name}_{text}"] = figures = best_of(runs)
            print(f"{name:7s} {text:7s}", "  ".join(f"{key} {figure:6.2f}" for key, figure in figures.items()))
    for name in ("ngram", "suffix"):
        report[f"{name}_prompt_us_per_token"] = per_token = prompt_cost(DRAFTERS[name]())
        print(f"{name:7s} a prompt of 100,000 tokens: {per_token:.2f} microseconds a token")
    report["suffix_us_beside_full_cache"] = figures = beside_full_cache()
    print(f"suffix  1,000,000 tokens finished: miss {figures[0]:.1f} us, forget {figures[1]:.2f} us a token")
    assert "torch" not in sys.modules, "drafters must not import torch"
    print(json.dumps(report))


def make_texts(rng: random.Random) -> dict[str, list[Text]]:
    """The texts by name."""
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    files = sorted((Path(tokenmill.__file__).parent / "engine" / "scheduler").glob("*.py"))
    sources = [tokenizer.encode(path.read_text(encoding="utf-8")).ids for path in files]
    sources = [source for source in sources if len(source) > 600][:8]
    records = [tokenizer.encode(json.dumps(make_records(rng), indent=1)).ids for _ in range(6)]
    return {
        "copy": [(source[:1024], edited(source[:1024], rng)) for source in sources],
        "json": [(record[:150], record[150:]) for record in records],
        "code": [(source[:300], source[300:1600]) for source in sources],
        "random": [(rng.choices(range(2000), k=200), rng.choices(range(2000), k=800)) for _ in range(3)],
    }


def make_records(rng: random.Random) -> list[dict[str, object]]:
    """Records with the same keys."""
    names, cities = ["anna", "ben", "carla", "dora", "emil"], ["Berlin", "Paris", "Rome"]
    return [
        {"id": rng.randrange(10_000), "name": rng.choice(names), "city": rng.choice(cities), "score": rng.random()}
        for _ in range(25)
    ]


def edited(tokens: Tokens, rng: random.Random) -> Tokens:
    """The tokens with 5% of them left out, replaced, or followed by another one."""
    result: Tokens = []
    for token in tokens:
        edit = rng.random() * 60
        if edit >= 1:
            result.append(rng.choice(tokens) if edit < 2 else token)
        if 2 <= edit < 3:
            result.append(rng.choice(tokens))
    return result


def drive(drafter: TextDrafter, pairs: list[Text], limit: int) -> dict[str, float]:
    """Let requests say these texts, one after the other; the figures of all their steps."""
    num_steps = num_tokens = num_drafted = 0
    seconds = 0.0
    for number, (prompt, said) in enumerate(pairs):
        request = make_request(str(number), prompt, len(said))
        drafter.propose(request, 0)
        done = 0
        while done < len(said):
            start = time.perf_counter()
            draft = drafter.propose(request, limit).token_ids
            seconds += time.perf_counter() - start
            drafted, right = draft.tolist(), 0
            while right < len(drafted) and said[done + right : done + right + 1] == [drafted[right]]:
                right += 1
            new = said[done : done + right + 1]
            request.append_outputs(new)
            done += len(new)
            num_steps += 1
            num_drafted += len(drafted)
        num_tokens += done
        drafter.forget_request(request)
    accepted = num_tokens - num_steps
    per_step = {"accepted_per_step": accepted / num_steps, "drafted_per_step": num_drafted / num_steps}
    return {**per_step, "us_per_call": seconds / num_steps * 1e6}


def make_request(name: str, prompt: Tokens, max_tokens: int) -> Request:
    """A request that may say so much."""
    params = SamplingParams(max_tokens=max_tokens + 1)
    return Request(name, prompt, params, arrival=0, max_tokens_total=len(prompt) + max_tokens + 1)


def best_of(runs: list[dict[str, float]]) -> dict[str, float]:
    """The figures, the time that of the fastest run; and of the slowest."""
    slowest = max(run["us_per_call"] for run in runs)
    return {key: round(min(run[key] for run in runs), 2) for key in runs[0]} | {"us_slowest_run": round(slowest, 2)}


def prompt_cost(drafter: TextDrafter) -> float:
    """Microseconds for each token of a long prompt, all calls together."""
    request = make_request("long", random.Random(2).choices(range(50_000), k=100_000), 10)
    start = time.perf_counter()
    for _ in range(50):
        drafter.propose(request, 0)
    return round((time.perf_counter() - start) / 100_000 * 1e6, 2)


def beside_full_cache() -> tuple[float, float]:
    """With a million tokens of finished outputs: a call of a request that finds nothing, and `forget` by the token."""
    drafter, rng = SuffixDrafter(), random.Random(3)
    took = []
    for number in range(1000):
        request = make_request(str(number), [0], 1000)
        request.append_outputs(rng.choices(range(20_000), k=1000))
        start = time.perf_counter()
        drafter.forget_request(request)
        took.append(time.perf_counter() - start)
    request = make_request("a", rng.choices(range(20_000), k=1000), 1000)
    drafter.propose(request, 16)
    calls = []
    for token in rng.choices(range(20_000), k=900):
        request.append_outputs([token])
        start = time.perf_counter()
        drafter.propose(request, 16)
        calls.append(time.perf_counter() - start)
    return round(statistics.median(calls) * 1e6, 2), round(statistics.median(took) / 1000 * 1e6, 3)


if __name__ == "__main__":
    main()
