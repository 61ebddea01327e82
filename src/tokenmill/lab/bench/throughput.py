"""`tokenmill bench throughput`: measure the tokens per second of an offline batch.

The recipe is the one that small engines publish: requests with uniformly random lengths and token ids, temperature
0.6, ignore_eos; the lengths here are 1/16 of theirs by default, to suit a machine with two cores.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.config.parser import Parser
from tokenmill.lab.bench.offline import (
    Trace,
    add_engine_flags,
    check_room,
    engine_config,
    engine_facts,
    highest_token_id,
    run_batch,
)
from tokenmill.lab.bench.outputs import add_output_flags, check_outputs, write_outputs
from tokenmill.lab.bench.plot import Line, Panel
from tokenmill.lab.bench.progress import progress_bar
from tokenmill.lab.bench.report import machine_facts, peak_memory_bytes
from tokenmill.lab.bench.samples import step_samples
from tokenmill.lab.bench.workload import Prompt, Workload, add_workload_flags, at_least, read_workload

if TYPE_CHECKING:
    from tokenmill.llm.llm import LLM

TEMPERATURE = 0.6
PLOT_POINTS = 100


class Measurement(msgspec.Struct, frozen=True):
    """One repeat."""

    seconds: float
    input_tokens: int
    output_tokens: int
    steps: int
    preemptions: int
    output_tokens_per_second: float
    total_tokens_per_second: float


def run(arguments: Sequence[str]) -> int:
    """Measure and print; returns 0.

    Raises:
        TokenMillError: a flag is out of range, or the model cannot be loaded.
    """
    namespace = make_parser().parse(arguments)
    at_least("--repeats", namespace.repeats, 1)
    check_outputs(namespace)
    config = engine_config(namespace)
    workload = read_workload(namespace, config.seed)

    from tokenmill.llm.local import load_llm

    with load_llm(config) as llm:
        check_room(llm, workload.longest)
        document, traces = measure(llm, workload, namespace.repeats)
    samples = (sample for run, trace in enumerate(traces, 1) for sample in step_samples(trace, run=run))
    write_outputs(namespace, document, lambda: [_panel(traces)], samples)
    return 0


def make_parser() -> Parser:
    """Return the parser of `bench throughput`."""
    parser = Parser("bench throughput", "Measure the tokens per second of an offline batch; the last line is JSON.")
    add_workload_flags(parser, num_prompts=256, lengths="6:64")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs; the median counts (default: 3)")
    add_output_flags(parser)
    add_engine_flags(parser)
    return parser


def measure(llm: LLM, workload: Workload, repeats: int) -> tuple[dict[str, Any], list[Trace]]:
    """Run the workload after a short warm-up; returns the JSON document and the trace of each repeat."""
    # The first steps allocate and choose kernels; a few requests of the real kind do that.
    warm_up = msgspec.structs.replace(workload, num_prompts=min(8, workload.num_prompts), seed=workload.seed - 1)
    run_batch(llm, warm_up.draw(highest_token_id(llm)), TEMPERATURE)
    runs, traces = [], []
    for repeat in range(repeats):
        one, trace = _run_once(llm, workload.draw(highest_token_id(llm), repeat), f"run {repeat + 1} of {repeats}")
        print(f"run {repeat + 1}: {one.output_tokens_per_second:.1f} output tokens/s", file=sys.stderr)
        runs.append(one)
        traces.append(trace)
    document = {
        "benchmark": "throughput",
        "output_tokens_per_second": statistics.median(one.output_tokens_per_second for one in runs),
        "total_tokens_per_second": statistics.median(one.total_tokens_per_second for one in runs),
        "workload": {**msgspec.to_builtins(workload), "temperature": TEMPERATURE, "ignore_eos": True},
        "engine": engine_facts(llm),
        "machine": {**machine_facts(), "peak_memory_bytes": peak_memory_bytes()},
        "runs": [msgspec.structs.asdict(one) for one in runs],
    }
    return document, traces


def _run_once(llm: LLM, prompts: list[Prompt], title: str) -> tuple[Measurement, Trace]:
    before = llm.stats()
    with progress_bar() as bar:
        task = bar.add_task(title, total=len(prompts), rate="")

        def show(finished: int, tokens: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, completed=finished, rate=f"{tokens / elapsed:.1f} tokens/s" if elapsed else "")

        trace = run_batch(llm, prompts, TEMPERATURE, show)
    after = llm.stats()
    input_tokens, output_tokens = sum(len(prompt.token_ids) for prompt in prompts), trace.tokens[-1]
    measurement = Measurement(
        seconds=trace.seconds,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        steps=after.step - before.step,
        preemptions=after.num_preemptions - before.num_preemptions,
        output_tokens_per_second=output_tokens / trace.seconds,
        total_tokens_per_second=(input_tokens + output_tokens) / trace.seconds,
    )
    return measurement, trace


def _panel(traces: Sequence[Trace]) -> Panel:
    lines = [_rate_over_time(f"run {number}", trace) for number, trace in enumerate(traces, 1)]
    return Panel("rate over time", "seconds since the start", "output tokens per second", lines)


def _rate_over_time(name: str, trace: Trace) -> Line:
    """Return the tokens per second of each stretch of steps; as many stretches as a picture can show."""
    stride = -(-len(trace.times) // PLOT_POINTS)
    times, tokens = [0.0, *trace.times[stride - 1 :: stride]], [0, *trace.tokens[stride - 1 :: stride]]
    rates = [(tokens[place] - tokens[place - 1]) / (times[place] - times[place - 1]) for place in range(1, len(times))]
    return Line(name, times[1:], rates)
