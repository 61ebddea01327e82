"""The kernels of a step, as torch's profiler saw them: how long each takes, and what the large ones reach."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tools.gpu.benchmarks import Rates
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from tokenmill.model.architecture.architecture import Architecture

Row = dict[str, Any]
Call = tuple[str, float]
"""A kernel's name and its microseconds."""

ATTENTION = re.compile(r"_attend|join_splits|flash|fmha|BatchDecode|BatchPrefill", re.IGNORECASE)
PRODUCT = re.compile(
    r"gemm|gemv|nvjet|cutlass|xmma|splitk|dot_kernel|^_multiply|::(add)?mm$|::_linear_pointwise$", re.IGNORECASE
)
# What adds up the parts of a product that was split.
PART_OF_PRODUCT = re.compile(r"splitk|reduce", re.IGNORECASE)
MOST_NAMES = 25
BYTES = 2


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work of a kind of kernel: bytes that it reads, operations."""

    num_bytes: float
    operations: float


def profiled(work: Callable[[], object], platform: Any) -> list[Call]:
    """The kernels of work that has been done before, in the order of their start; on a CPU torch's own operations."""
    is_cuda = platform.name == "cuda"
    activity, device = (ProfilerActivity.CUDA, DeviceType.CUDA) if is_cuda else (ProfilerActivity.CPU, DeviceType.CPU)
    platform.synchronize()
    with torch.profiler.profile(activities=[activity]) as profile:
        work()
        platform.synchronize()
    events = sorted(profile.events() or [], key=lambda event: event.time_range.start)
    # The host's own calls are among the events.
    return [(event.name, float(event.time_range.elapsed_us())) for event in events if event.device_type == device]


def step_costs(architecture: Architecture, tokens: int, outputs: int, seen: float) -> dict[str, Cost]:
    """The costs of a step in two-byte numbers.

    Args:
        tokens: of the step.
        outputs: tokens that have logits.
        seen: keys that all tokens together attend to; a decode reads each of them, a prompt shares them.
    """
    vocabulary = architecture.vocab_size * architecture.hidden_size
    inner = architecture.num_parameters() - vocabulary * (1 if architecture.tie_embeddings else 2)
    q_size = sum(layer.attention.q_size for layer in architecture.layers)
    keys = seen if tokens == outputs else tokens
    return {
        "attention": Cost(keys * architecture.kv_bytes_per_token(BYTES), 4 * q_size * seen),
        "products": Cost(BYTES * inner, 2 * inner * tokens),
        "head": Cost(BYTES * (vocabulary + outputs * architecture.vocab_size), 2 * vocabulary * outputs),
    }


def kinds_of(calls: Sequence[Call]) -> list[str]:
    """Return the purpose of each call. The head is the last product of a step."""
    kinds = []
    for name, _ in calls:
        kinds.append("attention" if ATTENTION.search(name) else "products" if PRODUCT.search(name) else "rest")
    whole = [
        place for place, kind in enumerate(kinds) if kind == "products" and not PART_OF_PRODUCT.search(calls[place][0])
    ]
    if whole:
        for place in range(whole[-1], len(kinds)):
            if kinds[place] == "products":
                kinds[place] = "head"
    return kinds


def kernel_rows(what: str, calls: Sequence[Call], costs: dict[str, Cost], rates: Rates) -> Iterator[Row]:
    """A row for each kind of kernel with what it reaches, then one for each kernel, the longest first."""
    kinds = kinds_of(calls)
    for kind in ("attention", "products", "head", "rest"):
        times = [microseconds for (_, microseconds), own in zip(calls, kinds, strict=True) if own == kind]
        row: Row = {"what": what, "kind": kind, "calls": len(times), "us": sum(times)}
        if times and kind in costs and row["us"]:
            cost, seconds = costs[kind], row["us"] / 1e6
            floor = max(cost.num_bytes / rates.copy_bytes, cost.operations / rates.operations)
            row |= {"gb_per_s": cost.num_bytes / seconds / 1e9, "tflops": cost.operations / seconds / 1e12}
            row["of_floor"] = floor / seconds
        yield row
    names: dict[str, list[float]] = {}
    for name, microseconds in calls:
        names.setdefault(name, []).append(microseconds)
    for name, times in sorted(names.items(), key=lambda entry: -sum(entry[1]))[:MOST_NAMES]:
        yield {"what": what, "kernel": name[:100], "calls": len(times), "us": sum(times)}
