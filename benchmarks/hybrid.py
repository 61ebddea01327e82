"""Decode steps behind a long context: Qwen3.5-0.8B's shape beside one of its size with attention in every layer.

    python benchmarks/hybrid.py [--quantization int8] [--rows 1 4 8] [--context 8192] [--threads 2] [--parts]

Both have random weights and the same head; the feed-forward blocks of the second are wider by what a gated delta
network has more of weights than attention has. A step is the native pass of all layers and the largest logit of each
row; engine, sampler and prompts are left out: the memory of KV and of states is filled with random numbers. Rows have
pages of their own, in random order. The two take turns in one process; medians of steps with quartiles, and of the
ratios of neighbouring turns. `--parts` prints where the time of a step goes, kernel by kernel. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.paging import PagedRequests, make_attention, states_of_step
from tools.gpu.folders import write_config

from tokenmill.lab.bench.report import machine_facts
from tokenmill.model.attention.backends.native import NativeAttention
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.kernels.native_kernels import NativeKernels
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.select import select_kernels
from tokenmill.model.kernels.stored_tensors import tensor_over
from tokenmill.model.models.host_model import on_host
from tokenmill.model.quantization.packed import QUANTIZATIONS, UNQUANTIZED
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import plan_model
from tokenmill.platform.host_arrays import HostArrays

PAGE_SIZE = 16
# As published, without unread fields.
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "full_attention_interval": 4,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
    "vocab_size": 248320,
}
FULL = {**HYBRID, "layer_types": ["full_attention"] * 24, "intermediate_size": 4368}


class Model:
    """A decoder with random weights, KV and states, for up to `rows` requests of `context` tokens."""

    def __init__(self, config: dict[str, Any], options: argparse.Namespace) -> None:
        formats = UNQUANTIZED if options.quantization == "none" else QUANTIZATIONS[options.quantization]
        kernels, _ = select_kernels("native", "cpu", "bfloat16", options.threads, formats)
        assert isinstance(kernels, NativeKernels), "they were asked for"
        with tempfile.TemporaryDirectory() as folder:
            architecture = read_architecture(write_config(Path(folder), config))
            plan = plan_model(Path(folder), architecture, kernels, load_format="dummy")
        self.decoder, self.weight_bytes, rows = plan.load(), plan.weight_bytes, max(options.rows)
        self.requests = PagedRequests([[0] * options.context] * rows, PAGE_SIZE, np.random.default_rng(0))
        spec, num_pages = self.decoder.attention_spec, self.requests.num_pages
        native = {"native": kernels.native}
        self.attention = make_attention("native", spec, num_pages, PAGE_SIZE, torch.bfloat16, **native)
        assert isinstance(self.attention, NativeAttention), "it was asked for"
        noise = torch.randn(1 << 20).bfloat16()
        for memory in self.attention.kv.tensors:
            for piece in tensor_over(memory).view(-1).split(len(noise)):
                piece.copy_(noise[: len(piece)])
        self.states = self.decoder.state_memory(rows, HostArrays()) if architecture.recurrences else None
        for states in [] if self.states is None else self.states.layers:
            for state in states:
                tensor_over(state).normal_(std=0.1)
        self.context = options.context
        self.model = on_host(self.decoder, self.attention)

    def batch(self, rows: int) -> ForwardBatch:
        """A decode of the first rows, each behind all its tokens but the last."""
        self.requests.computed = [self.context - 1] * len(self.requests.computed)
        batch = self.requests.batch([(row, 1) for row in range(rows)])
        if self.states is None:
            return batch
        return msgspec.structs.replace(batch, states=states_of_step(self.states, np.arange(rows), batch.query_starts))

    @torch.inference_mode()
    def step(self, batch: ForwardBatch) -> float:
        """Seconds of a step."""
        began = time.perf_counter()
        self.model.argmax(self.model.forward(batch, self.attention))
        return time.perf_counter() - began

    @property
    def kv_bytes(self) -> int:
        """Of a token."""
        return sum(tensor.nbytes for tensor in self.attention.kv.tensors) // (self.requests.num_pages * PAGE_SIZE)


def measure(models: dict[str, Model], rows: int, turns: int, steps: int) -> dict[str, Any]:
    """Both in turns; the first step after each change is not counted."""
    batches = {name: model.batch(rows) for name, model in models.items()}
    found: dict[str, list[list[float]]] = {name: [] for name in models}
    for _ in range(turns):
        for name, model in models.items():
            model.step(batches[name])
            found[name].append([model.step(batches[name]) for _ in range(steps)])
    medians = {name: [statistics.median(turn) for turn in own] for name, own in found.items()}
    ratios = [full / hybrid for hybrid, full in zip(medians["hybrid"], medians["full"], strict=True)]
    step_ms = {name: quartiles([1e3 * one for turn in own for one in turn]) for name, own in found.items()}
    return {"rows": rows, "step_ms": step_ms, "times_as_fast": quartiles(ratios)}


def quartiles(samples: Sequence[float]) -> list[float]:
    """The first, the median and the third."""
    return [round(value, 2) for value in statistics.quantiles(samples)]


class Parts:
    """Adds up the time of calls, kernel by kernel, while a step runs in Python."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Time a method of a class."""
        plain: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = plain(*arguments, **named)
            self.seconds[name] += time.perf_counter() - began
            return result

        setattr(owner, method, timed)


def parts_of(models: dict[str, Model], rows: Sequence[int], steps: int) -> None:
    """Print milliseconds of a step, kernel by kernel."""
    parts = Parts()
    for method in ("multiply", "gated", "argmax"):
        parts.watch(PackedWeight, method, "head" if method == "argmax" else "linears")
    for method in ("short_conv", "delta_rule", "gated_rms_norm", "sigmoid_gate", "rms_norm", "add_rms_norm"):
        parts.watch(NativeKernels, method, method)
    parts.watch(NativeAttention, "forward", "attention")
    for count in rows:
        for name, model in models.items():
            batch = model.batch(count)
            model.model = model.decoder
            model.step(batch)
            parts.seconds.clear()
            whole = sum(model.step(batch) for _ in range(steps))
            found = {**parts.seconds, "the rest": whole - sum(parts.seconds.values()), "step": whole}
            shown = ", ".join(f"{part} {1e3 * seconds / steps:.2f}" for part, seconds in found.items())
            print(f"{name}, {count} rows, kernel by kernel: {shown}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quantization", default="int8", choices=["none", *QUANTIZATIONS])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    models = {"hybrid": Model(HYBRID, options), "full": Model(FULL, options)}
    sizes = {
        name: {"weights": model.weight_bytes, "parameters": model.decoder.architecture.num_parameters()}
        | {"kv_of_a_token": model.kv_bytes, "state": model.decoder.architecture.state_bytes(2)}
        for name, model in models.items()
    }
    print(json.dumps(sizes), flush=True)
    results = []
    for rows in options.rows:
        results.append(measure(models, rows, options.turns, options.steps))
        print(results[-1], flush=True)
    if options.parts:
        parts_of(models, options.rows, options.steps * 2)
    print(json.dumps({**vars(options), "machine": machine_facts(), "bytes": sizes, "results": results}))


if __name__ == "__main__":
    main()
