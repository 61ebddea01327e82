"""`tokenmill bench throughput`: tokens per second of an offline batch. Progress on stderr, one JSON line on stdout.

The recipe is the one that small engines publish: requests with uniformly random lengths and token ids, temperature
0.6, ignore_eos; the lengths here are 1/16 of theirs by default, to suit a machine with two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.cli.flags import add_config_file_flag, add_flags, build, check_names, read_given
from tokenmill.cli.parser import Parser
from tokenmill.config import EngineConfig
from tokenmill.errors import InvalidConfig

if TYPE_CHECKING:
    from tokenmill.llm import LLM

TEMPERATURE = 0.6
HIGHEST_TOKEN_ID = 10_000


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured.

    Attributes:
        input_len, output_len: lowest and highest number of tokens, both drawn uniformly.
        seed: of the first repeat; each further one adds 1, so that no prompt is found in the prefix cache.
    """

    num_requests: int
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    seed: int
    repeats: int

    def draw(self, repeat: int, vocab_size: int) -> tuple[list[list[int]], list[int]]:
        """Prompts, [num_requests][input length] token ids, and output lengths, [num_requests]."""
        source = random.Random(self.seed + repeat)
        highest = min(HIGHEST_TOKEN_ID, vocab_size - 1)
        lengths = [source.randint(*self.input_len) for _ in range(self.num_requests)]
        prompts = [[source.randint(0, highest) for _ in range(length)] for length in lengths]
        return prompts, [source.randint(*self.output_len) for _ in range(self.num_requests)]


@dataclass(frozen=True, slots=True)
class Measurement:
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
    if list(arguments[:1]) != ["throughput"] and not {"-h", "--help"} & set(arguments):
        print("tokenmill bench: say what to measure: tokenmill bench throughput", file=sys.stderr)
        return 2
    namespace = make_parser().parse(arguments)
    given = read_given(namespace, os.environ)
    check_names(given, (EngineConfig,))
    config = build(EngineConfig, given).resolve()
    workload = read_workload(namespace)

    from tokenmill.cli.local import load_llm

    with load_llm(config) as llm:
        print(json.dumps(measure(llm, workload)))
    return 0


def make_parser() -> Parser:
    """The parser of `bench throughput`."""
    parser = Parser("bench", "Measure the tokens per second of an offline batch; the last line is JSON.", "throughput")
    parser.add_argument("what", choices=("throughput",), help="tokens per second of an offline batch")
    group = parser.add_argument_group("workload")
    group.add_argument("--num-requests", type=int, default=256, metavar="N", help="requests (default: 256)")
    group.add_argument("--input-len", default="6:64", metavar="LOW:HIGH", help="prompt tokens (default: 6:64)")
    group.add_argument("--output-len", default="6:64", metavar="LOW:HIGH", help="output tokens (default: 6:64)")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="runs; the median counts (default: 3)")
    add_config_file_flag(parser)
    add_flags(parser, EngineConfig, "engine (--seed also draws the workload)")
    return parser


def read_workload(namespace: argparse.Namespace) -> Workload:
    """The workload that the flags describe.

    Raises:
        InvalidConfig: naming the flag.
    """
    for name in ("num_requests", "repeats"):
        if getattr(namespace, name) < 1:
            raise InvalidConfig(f"--{name.replace('_', '-')} must be at least 1")
    return Workload(
        namespace.num_requests,
        _read_range("--input-len", namespace.input_len),
        _read_range("--output-len", namespace.output_len),
        getattr(namespace, "seed", 0),
        namespace.repeats,
    )


def measure(llm: LLM, workload: Workload) -> dict[str, Any]:
    """Run the workload after a short warm-up; returns the JSON document."""
    longest = workload.input_len[1] + workload.output_len[1]
    if longest > llm.info.max_model_len:
        raise InvalidConfig(f"lengths of up to {longest} tokens exceed the context of {llm.info.max_model_len}")
    # The first steps allocate and choose kernels; a few requests of the real kind do that.
    _run_once(llm, Workload(min(8, workload.num_requests), workload.input_len, (4, 4), workload.seed - 1, 1), 0)
    runs = [_run_once(llm, workload, repeat) for repeat in range(workload.repeats)]
    for number, one in enumerate(runs, 1):
        print(f"run {number}: {one.output_tokens_per_second:.1f} output tokens/s", file=sys.stderr)
    return {
        "benchmark": "throughput",
        "output_tokens_per_second": statistics.median(one.output_tokens_per_second for one in runs),
        "total_tokens_per_second": statistics.median(one.total_tokens_per_second for one in runs),
        "workload": {**asdict(workload), "temperature": TEMPERATURE, "ignore_eos": True},
        "engine": _engine_facts(llm),
        "machine": _machine_facts(),
        "runs": [asdict(one) for one in runs],
    }


def _run_once(llm: LLM, workload: Workload, repeat: int) -> Measurement:
    from tokenmill.sampling_params import SamplingParams

    prompts, output_lengths = workload.draw(repeat, llm.info.vocab_size)
    params = [SamplingParams(temperature=TEMPERATURE, ignore_eos=True, max_tokens=length) for length in output_lengths]
    before, start = llm.stats(), time.perf_counter()
    results = llm.generate(prompts, params)
    seconds, after = time.perf_counter() - start, llm.stats()
    input_tokens = sum(result.num_prompt_tokens for result in results)
    output_tokens = sum(result.num_output_tokens for result in results)
    assert output_tokens == sum(output_lengths), "a request ended before its length"
    return Measurement(
        seconds=seconds,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        steps=after.step - before.step,
        preemptions=after.num_preemptions - before.num_preemptions,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(input_tokens + output_tokens) / seconds,
    )


def _engine_facts(llm: LLM) -> dict[str, Any]:
    import msgspec

    facts: dict[str, Any] = msgspec.to_builtins(llm.info)
    return facts


def _machine_facts() -> dict[str, Any]:
    import resource

    from tokenmill.cli.version import versions

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**versions(), "cpus": os.cpu_count(), "peak_memory_kib": peak}


def _read_range(flag: str, text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high.isdecimal() or not high)):
        raise InvalidConfig(f"{flag} must be a number or LOW:HIGH, got {text!r}")
    lengths = int(low), int(high or low)
    if not 1 <= lengths[0] <= lengths[1]:
        raise InvalidConfig(f"{flag} must rise from at least 1, got {text!r}")
    return lengths
