"""Layers that keep a state, alone: the delta rule, the short convolution and their gates, on the native kernels.

    python benchmarks/recurrence.py [--threads 2] [--isa avx2] [--rounds 15]

Shapes of Qwen3.5 and Qwen3-Next (16 key heads, 16 or 32 value heads of 128) and of LFM2. Printed are the fastest and
the median round; what is read and written a second by decodes, where a state is read and written once; and for prompts
the multiply-adds a second, 3 for each number of a state and token. First come the machine's limits: a tensor multiplied
in place by torch, which reads and writes as a decode does. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from tokenmill.lab.bench.report import machine_facts
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.native_recurrence import NativeRecurrence
from tokenmill.model.kernels.states import StateRows

SIZE, KEY_HEADS = 128, 16
STEPS = {"decode of 1": [1], "decode of 64": [1] * 64, "prompt of 512": [512], "prompts of 2 x 1,024": [1024, 1024]}


def measure(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The fastest and the median of some rounds, in seconds, after one that does not count."""
    work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times), statistics.median(times)


def rows_of(lengths: list[int]) -> StateRows:
    """Requests whose states lie in a row."""
    stops = np.cumsum(lengths)
    spans = np.stack((stops - lengths, stops), 1).astype(np.int32)
    starts, stops = torch.from_numpy(spans.T.copy())
    return StateRows(torch.arange(len(lengths)), starts, stops, spans)


def drawn(*shape: int) -> torch.Tensor:
    """Of the size of activations."""
    return torch.randn(shape).bfloat16()


def delta_rule(kernels: NativeRecurrence, heads: int, lengths: list[int]) -> tuple[Callable[[], object], int, float]:
    """The work, its bytes of states, its multiply-adds."""
    tokens, rows = sum(lengths), rows_of(lengths)
    mixed, gates = drawn(tokens, (2 * KEY_HEADS + heads) * SIZE), drawn(tokens, 2 * heads)
    state, a_log, dt_bias = torch.randn(len(lengths), heads, SIZE, SIZE), drawn(heads), drawn(heads)
    out = drawn(tokens, heads * SIZE)
    work = lambda: kernels.delta_rule(mixed, gates, a_log, dt_bias, state, rows, out)  # noqa: E731
    return work, 2 * state.nbytes, 3.0 * tokens * heads * SIZE * SIZE


def short_conv(kernels: NativeRecurrence, channels: int, width: int, lengths: list[int]) -> Callable[[], object]:
    """The work."""
    x, weight, rows = drawn(sum(lengths), channels), drawn(channels, width), rows_of(lengths)
    state, out = drawn(len(lengths), channels, width - 1), drawn(sum(lengths), channels)
    return lambda: kernels.short_conv(x, weight, None, state, rows, out, silu=width == 4)


def gates(kernels: NativeRecurrence, tokens: int) -> dict[str, Callable[[], object]]:
    """The works, of 32 heads."""
    x, gate, weight = drawn(tokens, 32 * SIZE), drawn(tokens, 32 * SIZE), drawn(SIZE)
    return {
        f"gated norm of {tokens}": lambda: kernels.gated_rms_norm(x, gate, weight, 1e-6),
        f"sigmoid gate of {tokens}": lambda: kernels.sigmoid_gate(x, gate),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    native = load_kernels(given.threads, given.isa)
    assert native is not None, "the native kernels are not built"
    kernels = NativeRecurrence(native)
    found: dict[str, object] = {}
    document: dict[str, object] = {"benchmark": "recurrence", "isa": native.isa, "machine": machine_facts()}

    def show(name: str, work: Callable[[], object], num_bytes: int = 0, products: float = 0) -> None:
        best, median = measure(work, given.rounds)
        rates = f"{num_bytes / best / 1e9:6.1f} GB/s" * bool(num_bytes) + f"{products / best / 1e9:6.1f} GFMA/s" * (
            products > 0
        )
        print(f"{name:45} {best * 1e6:9.1f} us, median {median * 1e6:9.1f}  {rates}", flush=True)
        found[name] = {"best": best, "median": median, "bytes": num_bytes, "products": products}

    torch.set_num_threads(given.threads)
    for mib in (2, 128):
        numbers = torch.ones(mib << 18)
        show(f"limit: {mib} MiB multiplied in place", lambda numbers=numbers: numbers.mul_(1.0), 2 * numbers.nbytes)
    torch.set_num_threads(1)
    for heads in (16, 32):
        for name, lengths in STEPS.items():
            work, num_bytes, products = delta_rule(kernels, heads, lengths)
            is_decode = max(lengths) == 1
            show(f"delta rule, {heads} heads, {name}", work, num_bytes * is_decode, products * (not is_decode))
    for channels, width in ((6144, 4), (8192, 4), (2048, 3)):
        for name, lengths in STEPS.items():
            show(f"convolution, {channels} x {width}, {name}", short_conv(kernels, channels, width, lengths))
    for tokens in (1, 512):
        for name, work in gates(kernels, tokens).items():
            show(name, work)
    print(json.dumps({**document, "threads": given.threads, "seconds": found}))


if __name__ == "__main__":
    main()
