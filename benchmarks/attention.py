"""Measure a layer of the native attention against the torch backend and the bytes it reads; and a step's draws.

    python benchmarks/attention.py [--threads 2] [--repeats 30] [--heads 16] [--kv-heads 8] [--head-dim 128]
                                   [--shared-prefix 2048] [--only WORDS]

Requests on shuffled pages of 16 tokens, more layers than the caches of the CPU hold. Times are milliseconds a layer (or
a call), each the smallest and the median of the repeats; `bandwidth` is what a sum over memory reads, probed before
each case. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenmill.core.plan import AdmittedRequest
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.kernels.heads import HeadNorms, RotaryTables
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.model.sampling.sampler import Sampler
from tokenmill.model.sampling.state import SamplingState

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.paging import PagedRequests, make_attention

PAGE_SIZE = 16
VOCAB_SIZE = 151_936
Case = tuple[int, int, int, int]
# name: (requests, context of each, tokens of each in the step, layers)
CASES: dict[str, Case] = {
    "decode, 1 request of 512": (1, 512, 1, 28),
    "decode, 8 requests of 128": (8, 128, 1, 28),
    "decode, 8 requests of 2,048": (8, 2048, 1, 4),
    "decode, 32 requests of 512": (32, 512, 1, 4),
    "decode, 1 request of 16,384": (1, 16_384, 1, 4),
    "prompt of 512": (1, 512, 512, 4),
    "prompt of 2,048": (1, 2048, 2048, 2),
    "512 tokens after 8,192": (1, 8704, 512, 2),
}
DRAWS = {
    "draw from all": SamplingParams(temperature=0.8),
    "draw from top-k 20, top-p 0.95": SamplingParams(temperature=0.8, top_k=20, top_p=0.95),
    "draw from top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
}


def timed(call: Callable[[], object], repeats: int, share: int) -> dict[str, float]:
    """Milliseconds of a `share`-th of a call."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    per = [one * 1e3 / share for one in seconds[1:]]
    return {"min_ms": round(min(per), 4), "median_ms": round(statistics.median(per), 4)}


def bandwidth() -> float:
    """GB/s of a sum over more memory than the caches hold."""
    memory = torch.ones(32 << 20)
    return round(memory.nbytes / (timed(memory.sum, 5, 1)["min_ms"] * 1e6), 1)


class Layers:
    """Random layers of one shape and the step that a case runs through them."""

    def __init__(self, case: Case, options: argparse.Namespace, shared: int = 0) -> None:
        requests, context, tokens, self.layers = case
        rng = np.random.default_rng(0)
        self.paged = PagedRequests([[0] * context] * requests, PAGE_SIZE, rng)
        self.paged.computed = [context - tokens] * requests
        self.batch = self.paged.batch([(request, tokens) for request in range(requests)])
        self.batch.page_table[:, : shared // PAGE_SIZE] = self.batch.page_table[0, : shared // PAGE_SIZE].clone()
        head_dim = options.head_dim
        self.spec = AttentionSpec(self.layers, options.heads, options.kv_heads, head_dim)
        angles = torch.outer(torch.arange(context).float(), 1e6 ** -(torch.arange(0, head_dim, 2) / head_dim))
        rotary = RotaryTables(angles.cos().bfloat16(), angles.sin().bfloat16())
        norms = HeadNorms(torch.ones(head_dim).bfloat16(), torch.ones(head_dim).bfloat16(), 1e-6)
        self.kinds = [AttentionLayer(layer, head_dim**-0.5, None, norms, rotary) for layer in range(self.layers)]
        self.qkv = torch.randn(requests * tokens, (options.heads + 2 * options.kv_heads) * head_dim).bfloat16()

    def time(self, name: str, repeats: int, **native: Any) -> dict[str, float]:
        """Milliseconds a layer on one backend."""
        attention = make_attention(name, self.spec, self.paged.num_pages, PAGE_SIZE, torch.bfloat16, **native)
        for memory in (attention.kv.keys, attention.kv.values):
            tensor_over(memory).random_(-9, 9)

        def step() -> None:
            plan = attention.plan(self.batch)
            for layer in self.kinds:
                attention.forward(self.qkv, layer, plan)

        return timed(step, repeats, self.layers)


def attention_rows(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every case on every way to run it."""
    native = load_kernels(options.threads)
    rows = {}
    prefix = options.shared_prefix
    behind = (32, prefix + 64, 1, 4)
    cases = {name: (case, 0) for name, case in CASES.items()}
    cases[f"decode, 32 requests of {behind[1]:,}"] = (behind, 0)
    cases[f"decode, 32 requests of {behind[1]:,}, {prefix:,} shared"] = (behind, prefix)
    for name, (case, shared) in cases.items():
        if options.only not in name:
            continue
        requests, context = case[:2]
        layers = Layers(case, options, shared)
        slots = requests * (context - shared) + shared
        kv_bytes = 2 * 2 * slots * options.kv_heads * options.head_dim
        rows[name] = {
            "bandwidth": (probed := bandwidth()),
            "floor_ms": round(kv_bytes / probed / 1e6, 4),
            "native": layers.time("native", options.repeats, native=native),
            "native, int8 KV": layers.time("native", options.repeats, native=native, kv_dtype="int8"),
            "torch": layers.time("cpu", max(3, options.repeats // 10)),
        }
        print(f"{name}: " + ", ".join(f"{way} {cost}" for way, cost in rows[name].items()), file=sys.stderr)
    return rows


def draw_rows(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Draws over the vocabulary of Qwen3, with native kernels and without."""
    samplers = {"native": Sampler(native=load_kernels(options.threads)), "torch": Sampler()}
    no_tokens = np.zeros((32, 1), dtype=np.int32)
    rows = {}
    for name, params in DRAWS.items():
        for count in (1, 8, 32):
            state = SamplingState(count, VOCAB_SIZE)
            for row in range(count):
                state.set(AdmittedRequest(row, str(row), np.zeros(1, np.int32), 1, params, (), row))
            metadata = state.select(np.arange(count), np.ones(count, np.int64))
            logits = (torch.randn(count, VOCAB_SIZE) * 3).numpy()
            calls = {
                way: functools.partial(each.sample_logits, logits, metadata, no_tokens)
                for way, each in samplers.items()
            }
            rows[f"{name}, {count} rows"] = {way: timed(call, options.repeats, 1) for way, call in calls.items()}
            print(f"{name}, {count} rows: {rows[f'{name}, {count} rows']}", file=sys.stderr)
    return rows


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--shared-prefix", type=int, default=2048, help="tokens that 32 decodes share, whole pages")
    parser.add_argument("--only", default="", help="only the cases of attention with these words in their names")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native = load_kernels(options.threads)
    if native is None:
        parser.error("the native kernels are not built")
    with torch.inference_mode():
        result = {"attention": attention_rows(options), "draws": {} if options.only else draw_rows(options)}
    print(json.dumps({"benchmark": "attention", "isa": native.isa, **vars(options), **result}))


if __name__ == "__main__":
    main()
