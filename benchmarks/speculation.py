"""Speculation on the CPU: tokens a second with and without it, on text that copies with edits and on other text.

    python benchmarks/speculation.py [--hybrid] [--quantization int8] [--streams 1 8 32] [--texts edits random]

Qwen3-0.6B's shape, or Qwen3.5-0.8B's (`--hybrid`), with random weights, whose own text nobody could copy: what the
sampler draws is replaced by a trace, after all that a draw costs. The prompt is a text of random tokens; the trace of
`edits` is that text with one token in twenty replaced, left out or put in (`edits:0.2`: one in five); of `random` it
has nothing to do with the prompt; of `words` it is drawn from a hundred tokens, so that drafts are found, most of them
wrong. Each way in turns, in one process and engine; medians of the ratios of neighbouring runs with quartiles, one line
of JSON last.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.edited_text import texts
from benchmarks.hybrid import HYBRID
from tools.gpu.folders import QWEN3_0_6B, write_config

from tokenmill.config.configs import EngineConfig
from tokenmill.config.speculation import SpeculationSettings, SpeculativeConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.runner.model_runner import ModelRunner
from tokenmill.engine.runner.samples import Samples
from tokenmill.engine.runner.step_sampler import HostSampler, Sampled, places
from tokenmill.engine.speculation.speculation import Speculation
from tokenmill.startup.assembly.setup import build_engine


class TracedSampler:
    """Samples as the sampler of a runner does, and says what the traces say."""

    def __init__(self, runner: ModelRunner, sampler: HostSampler) -> None:
        self._sampler = sampler
        self._tables = runner._rows.tables
        self.prompts: list[list[int]] = []
        self.traces: list[list[int]] = []

    def sample(self, outputs: torch.Tensor, samples: Samples, metadata: Any, sent: Any, masks: Any) -> Sampled:
        """See `StepSampler`. Which trace a row follows, its first token tells."""
        sampled = self._sampler.sample(outputs, samples, metadata, sent, masks)
        for number, (row, position) in enumerate(zip(samples.rows.tolist(), samples.positions.tolist(), strict=True)):
            stream = int(self._tables.tokens[row, 0]) % 64
            if stream < len(self.traces):
                trace, start = self.traces[stream], len(self.prompts[stream])
                sampled.token_ids[number] = trace[min(position - start, len(trace) - 1)]
        self._tables.write_tokens(*places(sent["draws"]), sampled.token_ids)
        return sampled


def start(folder: Path, options: argparse.Namespace) -> tuple[Engine, SpeculationSettings]:
    """An engine with a traced sampler, and the settings of the speculation that it was started with."""
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        load_format="dummy",
        max_num_seqs=max(options.streams),
        max_model_len=2 * options.length + 64,
        quantization=options.quantization,
        num_pages=max(options.streams) * (2 * options.length // 16 + 4),
        enable_prefix_caching=False,
        speculative_config="suffix",
    )
    engine = build_engine(config.resolve()).engine
    (drafter,) = engine.scheduler.state.drafters
    assert isinstance(drafter, Speculation), "it was asked for"
    return engine, drafter.settings


def run(engine: Engine, prompts: list[list[int]], traces: list[list[int]]) -> tuple[float, float, float]:
    """Tokens a second of all streams from their first token on, tokens a step and stream, share of drafts accepted."""
    for number, (prompt, trace) in enumerate(zip(prompts, traces, strict=True)):
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=len(trace))
        engine.add(AddRequest(id=f"{engine.num_arrived}-{number}", prompt_token_ids=prompt, params=params))
    begun: set[str] = set()
    while len(begun) < len(prompts):
        begun |= {output.id for output in engine.step()}
    num_tokens = num_steps = 0
    before = engine.stats()
    began = time.perf_counter()
    while engine.has_work:
        num_tokens += sum(len(output.token_ids) for output in engine.step())
        num_steps += 1
    seconds, after = time.perf_counter() - began, engine.stats()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    return num_tokens / seconds, num_tokens / num_steps / len(prompts), accepted / max(1, drafted)


def measure(engine: Engine, settings: SpeculationSettings, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every text, number of streams and method against none."""
    runner = engine.executor.runner  # type: ignore[attr-defined]
    runner._sampler = traced = TracedSampler(runner, runner._sampler)
    rows = []
    for kind in options.texts:
        for streams in options.streams:
            found: dict[str, list[tuple[float, float, float]]] = {method: [] for method in ("off", *options.methods)}
            for turn in range(options.turns):
                rng = random.Random(turn)
                # The same tokens a step for any number of streams: long enough to be timed, no longer.
                length = max(64, options.length // max(1, streams // 4))
                pairs = [texts(kind, number, length, rng) for number in range(streams)]
                traced.prompts, traced.traces = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
                for method, results in found.items():
                    engine.scheduler.state.drafters = drafters_of(method, settings)
                    results.append(run(engine, traced.prompts, traced.traces))
            rows += [row(kind, streams, method, found["off"], found[method]) for method in options.methods]
            for one in rows[-len(options.methods) :]:
                print(json.dumps(one), file=sys.stderr, flush=True)
    return rows


def drafters_of(method: str, settings: SpeculationSettings) -> tuple[Speculation, ...]:
    """One that has seen nothing yet, or none."""
    if method == "off":
        return ()
    config = SpeculativeConfig(method=method)  # type: ignore[arg-type]
    return (Speculation(SpeculationSettings(config, settings.step_costs)),)


def row(
    kind: str,
    streams: int,
    method: str,
    off: list[tuple[float, float, float]],
    on: list[tuple[float, float, float]],
) -> dict[str, Any]:
    """Return the result of one comparison."""
    ratios = [with_it / without for (without, *_), (with_it, *_) in zip(off, on, strict=True)]
    return {
        "text": kind,
        "streams": streams,
        "method": method,
        "off_tokens_s": round(statistics.median(rate for rate, *_ in off), 1),
        "tokens_s": round(statistics.median(rate for rate, *_ in on), 1),
        "ratio": [round(value, 3) for value in (statistics.quantiles(ratios) if len(ratios) > 1 else ratios)],
        "tokens_a_step": round(statistics.median(count for _, count, _ in on), 2),
        "accepted": round(statistics.median(share for *_, share in on), 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hybrid", action="store_true", help="a model with recurrent states")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--texts", nargs="+", default=["edits", "random", "words"])
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine, settings = start(write_config(Path(folder), HYBRID if options.hybrid else QWEN3_0_6B), options)
        rows = measure(engine, settings, options)
        engine.close()
    costs = [(size, round(1e3 * seconds, 1)) for size, seconds in settings.step_costs]
    print(json.dumps({"quantization": options.quantization, "step_ms": costs, "rows": rows}))


if __name__ == "__main__":
    main()
