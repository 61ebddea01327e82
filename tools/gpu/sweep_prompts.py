"""Attention of prompts by each variant of the kernel, checked against float32 and timed in turns with the engine's.

    python -m tools.gpu.sweep_prompts [--seconds 100] [--only NAME]

Every variant runs in a process of its own, which compiles beside the others, takes the device alone, and is killed
where it hangs. A row each as it comes: milliseconds of the engine's kernel and of the variant, Tflop/s, and the error.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LOCK = "/tmp/sweep_prompts.lock"
# After which a variant that has the device is killed.
HELD_SECONDS = 25
RATE_ROUNDS, RATE_REPEATS = 5, 6


@dataclass(frozen=True)
class Shape:
    """Requests with new tokens behind cached ones; heads, page size, type, window and sinks."""

    name: str
    new: tuple[int, ...]
    cached: tuple[int, ...]
    group: int = 2
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    window: int | None = None
    has_sinks: bool = False
    is_timed: bool = False

    @property
    def operations(self) -> float:
        seen = sum(n * c + n * (n + 1) / 2 for n, c in zip(self.new, self.cached, strict=True))
        return 4 * seen * self.group * self.kv_heads * self.head_dim


LONG = Shape("prompt of 8192", (8192,), (0,), is_timed=True)
CHUNK = Shape("2048 after 30000", (2048,), (30000,), is_timed=True)
SHORT = Shape("16 of 512", (512,) * 16, (0,) * 16, is_timed=True)
ODD = Shape("uneven, cached", (701, 1, 1333), (77, 1000, 130))
FOUR = Shape("group 4, uneven, cached", (701, 1, 1333), (77, 1000, 130), group=4, kv_heads=4)
SEVEN = Shape("group 7, uneven", (300, 65, 999), (5, 0, 1100), group=7, kv_heads=2)
WINDOW = Shape("window 300, sinks", (701, 5, 1333), (77, 1000, 2130), window=300, has_sinks=True)
SMALL_HEADS = Shape("head 64, page 64", (701, 5, 2048), (77, 1000, 0), head_dim=64, page_size=64, is_timed=True)
LARGE_HEADS = Shape("head 256, page 32", (701, 5, 4096), (77, 1000, 0), head_dim=256, page_size=32, is_timed=True)
LARGE_PAGES = Shape("page 256, float16, group 1", (701, 5, 4096), (77, 1000, 0), 1, page_size=256, dtype="float16")
COMMON = (LONG, CHUNK, SHORT, ODD)


def variants() -> dict[str, tuple[Any, tuple[Shape, ...]]]:
    """Return launches by their names: keyword arguments of `Tiling`, or of today's kernel; and the shapes to try."""
    two, three = {"keys": 128, "stages": 2, "groups": 2}, {"keys": 64, "stages": 4, "groups": 3, "registers": 160}
    three |= {"loaders": 24}
    stays = {"programs": 132}
    return {
        "g2": (two, COMMON),
        "g2-stays": (two | stays, COMMON),
        "g2-turns": (two | {"takes_turns": True}, COMMON),
        "g2-turns-stays": (two | stays | {"takes_turns": True}, COMMON),
        "g2-unpinned": (two | {"pins": False}, (LONG, CHUNK)),
        "g2-turns-unpinned": (two | {"takes_turns": True, "pins": False}, (LONG, CHUNK)),
        "g2-64": (two | {"keys": 64, "stages": 4}, (LONG, CHUNK)),
        "g3-64": (three, COMMON),
        "g3-64-stays": (three | stays, (LONG, CHUNK, SHORT)),
        "g3-64-unpinned": (three | {"pins": False}, (LONG, CHUNK)),
        "g2-groups": (two | stays, (FOUR, SEVEN)),
        "g2-window": (two, (WINDOW,)),
        "g2-single": (two, (ODD,)),
        "g2-heads": (two, (SMALL_HEADS, LARGE_PAGES)),
        "g2-256": (two | {"keys": 64}, (LARGE_HEADS,)),
    }


class Inputs:
    """Random tensors of a shape; pages in no order, slots outside of requests are NaN."""

    def __init__(self, shape: Shape, seed: int) -> None:
        from tokenmill.model.kernels.triton.attention import PagedKV, Scores

        self.shape = shape
        draw = torch.Generator("cuda").manual_seed(seed)
        dtype = getattr(torch, shape.dtype)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, device="cuda", generator=draw).to(dtype)

        self.lens = [n + c for n, c in zip(shape.new, shape.cached, strict=True)]
        held = [-(-n // shape.page_size) for n in self.lens]
        ids = 1 + torch.randperm(sum(held), device="cuda", generator=draw)
        table = torch.zeros(len(held), max(held) + 3, dtype=torch.int32, device="cuda")
        size = (sum(held) + 1, shape.page_size, shape.kv_heads, shape.head_dim)
        memory = [torch.full(size, float("nan"), device="cuda", dtype=dtype) for _ in "kv"]
        self.sequences = []
        done = 0
        for row, (count, length) in enumerate(zip(held, self.lens, strict=True)):
            own = ids[done : done + count]
            table[row, :count] = own.int()
            done += count
            pair = [normal(length, shape.kv_heads, shape.head_dim) for _ in "kv"]
            for part, new in zip(memory, pair, strict=True):
                part.view(-1, *size[2:])[self._slots(own, length)] = new
            self.sequences.append(pair)
        starts = torch.tensor([0, *torch.tensor(shape.new).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
        lens = torch.tensor(self.lens, dtype=torch.int32, device="cuda")
        self.kv = PagedKV(memory[0], memory[1], table, lens, starts)
        heads = shape.group * shape.kv_heads
        # Queries of a wider tensor, as behind a product that makes queries, keys and values.
        self.q = normal(sum(shape.new), heads + 2 * shape.kv_heads, shape.head_dim)[:, :heads]
        sinks = normal(heads) if shape.has_sinks else None
        self.scores = Scores(shape.head_dim**-0.5, shape.window, sinks)

    def _slots(self, own: torch.Tensor, length: int) -> torch.Tensor:
        place = torch.arange(length, device="cuda")
        return own[place // self.shape.page_size] * self.shape.page_size + place % self.shape.page_size

    def expected(self) -> torch.Tensor:
        """Return the result in float32, head by head."""
        shape, rows, start = self.shape, [], 0
        for new, (keys, values) in zip(shape.new, self.sequences, strict=True):
            q = self.q[start : start + new].float()
            start += new
            place = torch.arange(len(keys), device="cuda")
            position = place[len(keys) - new :, None]
            visible = place <= position
            if shape.window is not None:
                visible &= place > position - shape.window
            heads = []
            for head in range(q.shape[1]):
                k, v = (part[:, head // shape.group].float() for part in (keys, values))
                weights = (q[:, head] @ k.T * self.scores.scale).masked_fill_(~visible, float("-inf"))
                if self.scores.sinks is not None:
                    sink = self.scores.sinks[head].float().expand(new, 1)
                    weights = torch.cat([weights, sink], 1).softmax(1)[:, :-1]
                else:
                    weights = weights.softmax(1)
                heads.append(weights @ v)
            rows.append(torch.stack(heads, 1))
        return torch.cat(rows)


def run_variant(name: str) -> None:
    """Compile, wait for the device, check and time one variant."""
    from tokenmill.model.kernels.triton.attention import attend_prompts
    from tokenmill.model.kernels.triton.prompts import Tiling, attend

    torch.backends.cuda.matmul.allow_tf32 = False
    options, shapes = variants()[name]
    tiling = Tiling(**options)
    seed = int.from_bytes(os.urandom(4), "little")
    torch.cuda.init()
    compile_ahead(shapes, tiling, name.endswith("single"))
    with Path(LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(f"HELD {name} {time.monotonic()}", flush=True)
        for shape in shapes:
            inputs = Inputs(shape, seed)
            output = torch.full(inputs.q.shape, float("nan"), device="cuda", dtype=inputs.q.dtype)

            def own(inputs: Inputs = inputs, output: torch.Tensor = output) -> None:
                attend(inputs.q, inputs.kv, output, inputs.scores, tiling)

            def today(inputs: Inputs = inputs, output: torch.Tensor = output) -> None:
                attend_prompts(inputs.q, inputs.kv, output, inputs.scores)

            own()
            torch.cuda.synchronize()
            mine = output.clone()
            wanted = inputs.expected()
            error = float((mine.float() - wanted).norm() / wanted.norm())
            largest = float((mine.float() - wanted).abs().max())
            today()
            theirs = float((output.float() - wanted).norm() / wanted.norm())
            own()
            is_same = torch.equal(output, mine)
            text = f"{name:18} {shape.name:24} error {error:.2e} (today {theirs:.2e}) max {largest:.3f} again {is_same}"
            del wanted
            if name.endswith("single"):
                text += " single " + singles(inputs, mine, tiling)
            if shape.is_timed:
                text += times(shape, today, own)
            print(("ok   " if error < 0.01 and is_same else "BAD  ") + text, flush=True)


def run_others() -> None:
    """Torch's own attention without pages, as a measure; then the experts of a step against their floor."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(1, 16, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    with Path(LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print(f"HELD others {time.monotonic()}", flush=True)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    work = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
                    ms = median_ms(work)
                print(f"ok   torch {backend}: {ms:.3f} ms {LONG.operations / ms / 1e9:.0f} TF", flush=True)
            except Exception as error:
                print(f"BAD  torch {backend}: {error}"[:300], flush=True)
        run_experts()


def run_experts() -> None:
    """Time the experts of one layer of Qwen3-30B-A3B by graphs, eight drawings each, against bytes over 3.0 TB/s."""
    from tokenmill.model.kernels.triton.experts import StackedExperts

    hidden, size, number, each, drawings = 2048, 768, 128, 8, 8
    like = torch.empty(0, device="cuda", dtype=torch.bfloat16)
    layer = StackedExperts(number, hidden, size, like)
    for weight, _ in (layer._gate_up, layer._down):
        weight.normal_(std=0.02)
    for batch in (1, 8, 64, 256):
        chosen = [torch.rand(batch, number, device="cuda").topk(each).indices for _ in range(drawings)]
        weights = torch.rand(batch, each, device="cuda").softmax(-1)
        x = torch.randn(batch, hidden, device="cuda", dtype=torch.bfloat16)
        for one in chosen:
            got = layer.mix(x, weights, one)
        rows = range(min(batch, 4))
        parts = [[layer.one(int(e), x[row : row + 1])[0].float() for e in chosen[-1][row]] for row in rows]
        wanted = torch.stack([(torch.stack(parts[row]) * weights[row, :, None]).sum(0) for row in rows])
        error = float((got[: len(rows)].float() - wanted).norm() / wanted.norm())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for one in chosen:
                layer.mix(x, weights, one)
        ms = median_ms(graph.replay) / drawings
        used = sum(len(one.unique()) for one in chosen) / drawings
        floor = used * 3 * hidden * size * 2 / 3.0e12 * 1e3
        print(f"ok   experts batch {batch}: {ms * 1e3:.0f} us, {used:.0f} experts, floor {floor * 1e3:.0f} us, error {error:.1e}")
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            layer.mix(x, weights, chosen[0])
            torch.cuda.synchronize()
        slow = sorted(found.key_averages(), key=lambda row: -row.device_time_total)[:6]
        text = ", ".join(f"{row.key[:30]} {row.device_time_total:.0f} us / {row.count}" for row in slow)
        print(f"ok       {text}", flush=True)


def median_ms(work: Callable[[], Any]) -> float:
    """Median milliseconds of some work, by events."""
    found = []
    for _ in range(RATE_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()
        begin.record()
        for _ in range(RATE_REPEATS):
            work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / RATE_REPEATS)
    return sorted(found)[len(found) // 2]


def compile_ahead(shapes: tuple[Shape, ...], tiling: Any, has_single: bool) -> None:
    """Compile what the shapes need, without a launch."""
    from tokenmill.model.kernels.triton import attention, prompts

    kernels = [(attention, "_attend"), (prompts, "_attend_prompts")]
    kept = [getattr(module, kernel) for module, kernel in kernels]
    for (module, kernel), own in zip(kernels, kept, strict=True):
        setattr(module, kernel, Warming(own))
    try:
        for shape in shapes:
            inputs = Inputs(Shape(**{**shape.__dict__, "new": (64,), "cached": (0,)}), 0)
            output = torch.empty_like(inputs.q)
            attention.attend_prompts(inputs.q, inputs.kv, output, inputs.scores)
            prompts.attend(inputs.q, inputs.kv, output, inputs.scores, tiling)
            if has_single:
                prompts.attend(inputs.q[:1], inputs.kv, output, inputs.scores, tiling, are_single=True)
    finally:
        for (module, kernel), own in zip(kernels, kept, strict=True):
            setattr(module, kernel, own)


class Warming:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **own: self._kernel.warmup(*args, grid=grid, **own)


def singles(inputs: Inputs, mine: torch.Tensor, tiling: Any) -> str:
    """Whether the last token of each request alone has the bits that it has at the end of its chunk."""
    from tokenmill.model.kernels.triton.attention import PagedKV
    from tokenmill.model.kernels.triton.prompts import attend

    last = inputs.kv.query_starts[1:].long() - 1
    starts = torch.arange(len(last) + 1, dtype=torch.int32, device="cuda")
    kv = PagedKV(inputs.kv.keys, inputs.kv.values, inputs.kv.page_table, inputs.kv.context_lens, starts)
    q = inputs.q[last].contiguous()
    output = torch.full_like(q, float("nan"))
    attend(q, kv, output, inputs.scores, tiling, are_single=True)
    return "equal bits" if torch.equal(output, mine[last]) else "BITS DIFFER"


def times(shape: Shape, today: Callable[[], None], own: Callable[[], None]) -> str:
    """Median milliseconds of both, in turns, and the host's time to launch."""
    found: dict[str, list[float]] = {"today": [], "own": []}
    for _ in range(2):
        found["today"].append(median_ms(today))
        found["own"].append(median_ms(own))
    before = time.perf_counter()
    for _ in range(50):
        own()
    host = (time.perf_counter() - before) / 50 * 1e6
    torch.cuda.synchronize()
    medians = {kind: min(one) for kind, one in found.items()}
    rates = {kind: shape.operations / ms / 1e9 for kind, ms in medians.items()}
    return (
        f" | today {medians['today']:.3f} ms {rates['today']:.0f} TF | own {medians['own']:.3f} ms"
        f" {rates['own']:.0f} TF | x{medians['today'] / medians['own']:.2f} | host {host:.0f} us"
    )


def follow(name: str, process: subprocess.Popen[str], until: float) -> None:
    """Print a variant's lines; kill it where it holds the device too long, or at the end of the time."""
    held = [until]

    def watch() -> None:
        while process.poll() is None:
            if time.monotonic() > min(held[0], until):
                process.kill()
                print(f"KILLED {name}", flush=True)
                return
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()
    tail = []
    for line in process.stdout or ():
        if line.startswith("HELD "):
            held[0] = time.monotonic() + HELD_SECONDS
        elif line.startswith(("ok ", "BAD ")):
            print(line, end="", flush=True)
        else:
            tail.append(line)
    if process.wait() != 0:
        print(f"FAILED {name} rc {process.returncode}: " + "".join(tail[-12:])[-1500:], flush=True)


def main() -> int:
    """Start all variants; those that fail or hang end alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--only", default="")
    parser.add_argument("--child", default="")
    options = parser.parse_args()
    if options.child:
        run_others() if options.child == "others" else run_variant(options.child)
        return 0
    until = time.monotonic() + options.seconds
    names = [name for name in (*variants(), "others") if not options.only or name in options.only.split(",")]
    threads = []
    for name in names:
        command = [sys.executable, "-m", "tools.gpu.sweep_prompts", "--child", name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threads.append(threading.Thread(target=follow, args=(name, process, until), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(max(0.0, until + 5 - time.monotonic()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
