"""Measure what the grammar of calls under `tool_choice: "auto"` costs free text: processor time a step, 16 streams.

    python benchmarks/lazy_calls.py [--streams 16] [--rounds 5] [--parser llama3_json]

The same prompts with the same tools and seeds, with `--tool-grammar on` and `off`, in turns; the demo model writes
text, not calls, so its tokens are the same. Prints the medians of steps that only decode, and their ratio; beside it
that of the fastest tenths, which other work on the machine disturbs least; JSON last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest, CallRules, GenerateText
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.demo import demo_model_path
from tokenmill.engine.loop.engine import Engine
from tokenmill.serving.frontend.processor_loading import load_text_processor
from tokenmill.serving.frontend.text_processor import TextProcessor
from tokenmill.startup.assembly.setup import build_engine

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}, "note": {"type": "string"}},
    "required": ["city"],
}
NUM_TOOLS = 8
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": f"tool_{number}", "parameters": SCHEMA}} for number in range(NUM_TOOLS)
]
PARAMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.95},
    "greedy": {"temperature": 0.0},
}


def ask(text: TextProcessor, engine: Engine, number: int, parser: str, is_lazy: bool, params: dict[str, Any]) -> None:
    """Start one request."""
    names = [tool["function"]["name"] for tool in TOOLS]
    rules = CallRules(parser, names, is_required=False, is_parallel=True, is_lazy=is_lazy)
    message = GenerateText(
        ids=[str(number)],
        messages=[{"role": "user", "content": f"Tell me a long story about {number} dogs."}],
        tools=TOOLS,
        calls=rules,
        reasoning="qwen3",
        params=SamplingParams(max_tokens=200, seed=number, **params),
    )
    for request in text.process(message).to_engine:
        assert isinstance(request, AddRequest), "a chat without images is only added"
        engine.add(request)


def steps(engine: Engine, num_streams: int) -> tuple[list[float], dict[str, list[int]]]:
    """Return the processor seconds of each step in which all streams decode, and the tokens of each."""
    seconds: list[float] = []
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        started = time.process_time()
        outputs = engine.step()
        passed = time.process_time() - started
        if len(outputs) == num_streams and all(tokens.get(output.id) for output in outputs):
            seconds.append(passed)
        for output in outputs:
            tokens.setdefault(output.id, []).extend(output.token_ids)
    return seconds, tokens


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=tuple(PARAMS), help="measure one kind of sampling")
    parser.add_argument("--parser", default="hermes", help="the notation of calls")
    options = parser.parse_args()
    folder = demo_model_path()
    config = EngineConfig(model=str(folder), num_threads=1, num_pages=2000, max_num_seqs=options.streams).resolve()
    text, engine = load_text_processor(folder, config), build_engine(config).engine
    result: dict[str, Any] = {"benchmark": "lazy_calls", "streams": options.streams}
    for name, params in PARAMS.items() if options.only is None else [(options.only, PARAMS[options.only])]:
        found: dict[bool, list[float]] = {False: [], True: []}
        outputs: dict[bool, dict[str, list[int]]] = {}
        for number in range(2 * options.rounds + 2):
            is_lazy = number % 2 == 1
            for stream in range(options.streams):
                ask(text, engine, stream, options.parser, is_lazy, params)
            seconds, outputs[is_lazy] = steps(engine, options.streams)
            if number > 1:  # the first round compiles
                found[is_lazy] += seconds
        off, on = (1e6 * statistics.median(found[key]) for key in (False, True))
        fast_off, fast_on = (1e6 * statistics.quantiles(found[key], n=10)[0] for key in (False, True))
        same = "the same tokens" if outputs[False] == outputs[True] else "other tokens"
        times = f"off {off:6.0f} us  on {on:6.0f} us a step  ratio {on / off:.3f}, {fast_on / fast_off:.3f}"
        print(f"{name:12} {times}  {same}, {len(found[True])} steps")
        ratios = {"ratio": on / off, "fast_ratio": fast_on / fast_off}
        result[name] = {"off_us": off, "on_us": on, **ratios, "steps": len(found[True])}
    engine.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
