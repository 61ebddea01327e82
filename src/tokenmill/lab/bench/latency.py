"""`tokenmill bench latency`: measure the seconds of a prefill and of a decode step, one batch at a time.

A batch is submitted at once. Its prefill lasts until every request has its first token; the steps after that are
decode steps of the whole batch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.config.parser import Parser
from tokenmill.core.errors import InvalidConfig
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
from tokenmill.lab.bench.report import distribution, machine_facts, peak_memory_bytes, spread
from tokenmill.lab.bench.samples import Sample, step_samples
from tokenmill.lab.bench.workload import UniformLengths, Workload, at_least

if TYPE_CHECKING:
    from tokenmill.llm.llm import LLM


class Plan(msgspec.Struct, frozen=True):
    """The points to measure: every batch size with every input length."""

    batch_sizes: tuple[int, ...]
    input_lens: tuple[int, ...]
    output_len: int
    num_iters: int
    num_iters_warmup: int
    seed: int


def run(arguments: Sequence[str]) -> int:
    """Measure and print; returns 0.

    Raises:
        TokenMillError: a flag is out of range, or the model cannot be loaded.
    """
    namespace = make_parser().parse(arguments)
    check_outputs(namespace)
    config = engine_config(namespace)
    plan = read_plan(namespace, config.seed)
    if max(plan.batch_sizes) > config.max_num_seqs:
        raise InvalidConfig(f"--batch-size {max(plan.batch_sizes)} exceeds --max-num-seqs {config.max_num_seqs}")

    from tokenmill.llm.local import load_llm

    with load_llm(config) as llm:
        check_room(llm, max(plan.input_lens) + plan.output_len)
        document, samples = measure(llm, plan)
    write_outputs(namespace, document, lambda: _panels(plan, document["points"]), samples)
    return 0


def make_parser() -> Parser:
    """Return the parser of `bench latency`."""
    parser = Parser("bench latency", "Measure prefill and decode steps of one batch; the last line is JSON.")
    group = parser.add_argument_group("workload")
    group.add_argument("--batch-size", default="1,8", metavar="N,N", help="requests at once (default: %(default)s)")
    group.add_argument("--input-len", default="32,256", metavar="N,N", help="prompt tokens (default: %(default)s)")
    group.add_argument("--output-len", type=int, default=64, metavar="N", help="tokens of each (default: %(default)s)")
    group.add_argument("--num-iters", type=int, default=3, metavar="N", help="measured batches (default: %(default)s)")
    group.add_argument(
        "--num-iters-warmup", type=int, default=1, metavar="N", help="batches before, as warm-up (default: 1)"
    )
    add_output_flags(parser)
    add_engine_flags(parser)
    return parser


def read_plan(namespace: argparse.Namespace, seed: int) -> Plan:
    """Read the plan that the flags describe.

    Raises:
        InvalidConfig: naming the flag.
    """
    # The first token belongs to the prefill.
    at_least("--output-len", namespace.output_len, 2)
    at_least("--num-iters", namespace.num_iters, 1)
    at_least("--num-iters-warmup", namespace.num_iters_warmup, 0)
    return Plan(
        _read_numbers("--batch-size", namespace.batch_size),
        _read_numbers("--input-len", namespace.input_len),
        namespace.output_len,
        namespace.num_iters,
        namespace.num_iters_warmup,
        seed,
    )


def measure(llm: LLM, plan: Plan) -> tuple[dict[str, Any], list[Sample]]:
    """Measure every point; returns the JSON document and the steps of the measured batches."""
    points: list[dict[str, Any]] = []
    samples: list[Sample] = []
    with progress_bar() as bar:
        batches = len(plan.batch_sizes) * len(plan.input_lens) * (plan.num_iters + plan.num_iters_warmup)
        task = bar.add_task("batches", total=batches, rate="")
        # Other prompts for each batch, so that none is found in the prefix cache.
        seeds = itertools.count(plan.seed)
        for input_len, batch_size in itertools.product(plan.input_lens, plan.batch_sizes):
            traces = []
            for _ in range(plan.num_iters_warmup + plan.num_iters):
                prompts = _workload(plan, batch_size, input_len, next(seeds)).draw(highest_token_id(llm))
                traces.append(run_batch(llm, prompts, temperature=0.0))
                bar.update(task, advance=1)
            measured = traces[plan.num_iters_warmup :]
            for number, trace in enumerate(measured, 1):
                samples += step_samples(trace, batch_size=batch_size, input_len=input_len, batch=number)
            point = _point(batch_size, input_len, measured)
            print(_line(point), file=sys.stderr)
            points.append(point)
    document = {
        "benchmark": "latency",
        "points": points,
        "workload": {**msgspec.structs.asdict(plan), "temperature": 0.0, "ignore_eos": True},
        "engine": engine_facts(llm),
        "machine": {**machine_facts(), "peak_memory_bytes": peak_memory_bytes()},
    }
    return document, samples


def _workload(plan: Plan, batch_size: int, input_len: int, seed: int) -> Workload:
    exact = UniformLengths(input_len, input_len), UniformLengths(plan.output_len, plan.output_len)
    return Workload(batch_size, *exact, seed)


def _point(batch_size: int, input_len: int, traces: Sequence[Trace]) -> dict[str, Any]:
    prefill = spread([trace.prefill_seconds for trace in traces])
    steps = [seconds for trace in traces for seconds in trace.decode_step_seconds]
    step = spread([statistics.median(trace.decode_step_seconds) for trace in traces])
    return {
        "batch_size": batch_size,
        "input_len": input_len,
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": batch_size * input_len / prefill["median"],
        # Spread of the batches' medians, and the distribution of all their steps.
        "decode_step_seconds": {**step, **(distribution(steps) or {})},
        "decode_tokens_per_second": batch_size / step["median"],
    }


def _line(point: dict[str, Any]) -> str:
    prefill, step = point["prefill_seconds"]["median"] * 1e3, point["decode_step_seconds"]["median"] * 1e3
    return (
        f"{point['batch_size']:>4} x {point['input_len']:<6} "
        f"prefill {prefill:8.1f} ms ({point['prefill_tokens_per_second']:.0f} tokens/s), "
        f"decode step {step:7.2f} ms ({point['decode_tokens_per_second']:.1f} tokens/s)"
    )


def _panels(plan: Plan, points: Sequence[dict[str, Any]]) -> list[Panel]:
    def line(input_len: int, name: str, low: str, high: str) -> Line:
        chosen = [point for point in points if point["input_len"] == input_len]
        y, lower, upper = ([point[name][one] * 1e3 for point in chosen] for one in ("median", low, high))
        return Line(f"{input_len} prompt tokens", [point["batch_size"] for point in chosen], y, lower, upper)

    def lines(*what: str) -> list[Line]:
        return [line(input_len, *what) for input_len in plan.input_lens]

    prefill, step = lines("prefill_seconds", "lowest", "highest"), lines("decode_step_seconds", "p50", "p99")
    return [
        Panel("prefill of the batch: median, lowest to highest", "requests at once", "milliseconds", prefill),
        Panel("decode step: median, p50 to p99 of all steps", "requests at once", "milliseconds", step),
    ]


def _read_numbers(flag: str, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
        raise InvalidConfig(f"{flag} must be one or more whole numbers from 1, such as 1,8,32; got {text!r}")
    return tuple(int(part) for part in parts)
