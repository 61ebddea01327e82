"""The demo model at one stream with its bundled draft and without: acceptance, and tokens a second behind the first.

    python benchmarks/draft_model.py [--samples 2] [--num-speculative-tokens 4] [--temperatures 0 0.7]

Held-out problems of every skill of the demo model, each answered in each way in turn, in one process:

    off        no speculation
    every      every draft is run
    weighed    as --speculative-config does it: drafts are run where they are expected to pay
    refused    a draft model whose drafts are never run: what it costs where it does not pay

What computes is one thread, so the seconds are those that the process has had of a core: neighbours disturb them less
than the wall's. Answers are compared. One line of JSON last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "train_demo"))

from data import Encoder
from evaluate import heldout

from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.request import Request, TokenArray
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.demo import demo_model_path, draft_model_path
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.startup.assembly.setup import build_engine


class EveryDraft:
    """Runs all that is proposed, or nothing."""

    def __init__(self, is_run: bool) -> None:
        self._is_run = is_run

    def propose(self, requests: Sequence[Request], limits: Sequence[int], num_tokens: int) -> list[TokenArray]:
        """See `Drafter`."""
        proposals = [request.proposal if self._is_run else None for request in requests]
        nothing = np.empty(0, dtype=np.int32)
        return [nothing if proposal is None else proposal.token_ids for proposal in proposals]

    def holds(self, request: Request, num_running: int) -> bool:
        """See `Drafter`."""
        return False

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """See `Drafter`."""

    def forget_request(self, request: Request) -> None:
        """See `Drafter`."""


def start(num_tokens: int) -> dict[str, Engine]:
    """An engine for each way."""
    named = {"method": "draft_model", "model": str(draft_model_path()), "num_speculative_tokens": num_tokens}
    engines = {}
    for way in ("off", "every", "weighed", "refused"):
        config = EngineConfig(
            model=str(demo_model_path()),
            device="cpu",
            num_pages=400,
            enable_prefix_caching=False,
            speculative_config=None if way == "off" else json.dumps(named),
        )
        engines[way] = build_engine(config.resolve()).engine
    (drafter,) = engines["weighed"].scheduler.state.drafters
    assert isinstance(drafter, Speculation), "it was asked for"
    for way in ("every", "refused"):
        engines[way].scheduler.state.drafters = (EveryDraft(way == "every"),)
    return engines


def answer(engine: Engine, prompt: list[int], temperature: float, max_tokens: int) -> tuple[list[int], float]:
    """The tokens of an answer, and the seconds of all but the first step that brought any."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=max_tokens)
    engine.add(AddRequest(id=str(engine.num_arrived), prompt_token_ids=prompt, params=params))
    token_ids: list[int] = []
    began = time.process_time()
    while engine.has_work:
        had_none = not token_ids
        token_ids += [token for output in engine.step() for token in output.token_ids]
        if had_none:
            began = time.process_time()
    return token_ids, time.process_time() - began


def measure(engines: dict[str, Engine], prompts: list[list[int]], temperature: float, turns: int) -> dict[str, Any]:
    """All prompts, as often as there are turns.

    Raises:
        AssertionError: an answer differs.
    """
    rates: dict[str, list[float]] = {way: [] for way in engines}
    counts = engines["every"].scheduler.draft_counts
    num_before, right_before = counts.num_draft_tokens, sum(counts.accepted_per_position)
    for _ in range(turns):
        tokens, seconds = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0.0)
        for prompt in prompts:
            answers = {way: answer(engine, prompt, temperature, 200) for way, engine in engines.items()}
            for way, (token_ids, taken) in answers.items():
                assert token_ids == answers["off"][0], f"{way} answers otherwise"
                tokens[way] += len(token_ids) - 1
                seconds[way] += taken
        for way, found in rates.items():
            found.append(tokens[way] / seconds[way])
    num_drafted = counts.num_draft_tokens - num_before
    return {
        "temperature": temperature,
        "acceptance": round((sum(counts.accepted_per_position) - right_before) / num_drafted, 3),
        "tokens_s": {way: round(statistics.median(found)) for way, found in rates.items()},
        "ratios": {
            way: [round(one / off, 3) for one, off in zip(found, rates["off"], strict=True)]
            for way, found in rates.items()
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=2, help="problems of each skill")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    encoder = Encoder(demo_model_path())
    samples = [sample for group in heldout(options.samples, 11).values() for sample in group]
    prompts = [encoder.tokenizer.encode(encoder.text(sample, prompt_only=True)).ids for sample in samples]
    engines = start(options.num_speculative_tokens)
    rows = [measure(engines, prompts, temperature, options.turns) for temperature in options.temperatures]
    settings = engines["weighed"].scheduler.state.drafters[0].settings  # type: ignore[attr-defined]
    costs = [(size, round(1e3 * seconds, 2)) for size, seconds in settings.step_costs]
    for engine in engines.values():
        engine.close()
    print(json.dumps({"prompts": len(prompts), "step_ms": costs, "rows": rows}))


if __name__ == "__main__":
    main()
