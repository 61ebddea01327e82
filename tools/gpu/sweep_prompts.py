"""Attention of prompts by the kernel for Hopper, checked against float32 and timed in turns with the one for all GPUs.

    python -m tools.gpu.sweep_prompts [--seconds 100] [--only NAME,NAME]

Prompts of many shapes, then torch's own attention without pages. A case runs in a process of its own, which compiles
beside the others, takes the device alone, and is killed where it hangs. A line as it comes.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

LOCK = "/tmp/sweep_prompts.lock"
# After which a case that has the device is killed.
HELD_SECONDS = 25.0
ROUNDS, REPEATS, LAUNCHES = 5, 6, 50
# Relative; half precision is off by 0.002 to 0.004.
LARGEST_ERROR = 0.01


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
        """Operations of the products over the keys that each token sees."""
        seen = sum(n * c + n * (n + 1) / 2 for n, c in zip(self.new, self.cached, strict=True))
        return 4 * seen * self.group * self.kv_heads * self.head_dim


LONG = Shape("prompt of 8192", (8192,), (0,), is_timed=True)
CHUNK = Shape("2048 after 30000", (2048,), (30000,), is_timed=True)
SHORT = Shape("16 of 512", (512,) * 16, (0,) * 16, is_timed=True)
ODD = Shape("uneven, cached", (701, 1, 1333), (77, 1000, 130))
FOUR = Shape("group 4, uneven, cached", (701, 1, 1333), (77, 1000, 130), group=4, kv_heads=4)
SEVEN = Shape("group 7, uneven", (300, 65, 999), (5, 0, 1100), group=7, kv_heads=2)
WINDOW = Shape("window 300, sinks", (701, 5, 1333), (77, 1000, 2130), window=300, has_sinks=True)
LARGE_HEADS = Shape("head 256, page 32", (701, 5, 4096), (77, 1000, 0), head_dim=256, page_size=32, is_timed=True)
LARGE_PAGES = Shape("page 256, float16, group 1", (701, 5, 4096), (77, 1000, 0), 1, page_size=256, dtype="float16")
CASES = {"long": (LONG, CHUNK, SHORT, ODD), "groups": (FOUR, SEVEN, WINDOW), "heads": (LARGE_HEADS, LARGE_PAGES)}
OTHERS = "others"


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


def run_case(name: str) -> None:
    """Compile, wait for the device, check and time one case."""
    shapes, num_programs = CASES[name], torch.cuda.get_device_properties(0).multi_processor_count
    torch.backends.cuda.matmul.allow_tf32 = False
    compile_ahead(shapes)
    seed = int.from_bytes(os.urandom(4), "little")
    with device_alone():
        for shape in shapes:
            print(checked(name, Inputs(shape, seed), num_programs), flush=True)


@contextmanager
def device_alone() -> Iterator[None]:
    """Wait until no other case computes; the parent's clock for this one begins."""
    with Path(LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("HELD", flush=True)
        yield


def checked(name: str, inputs: Inputs, num_programs: int) -> str:
    """A line on one shape: relative errors, whether a second launch has the same bits, and times."""
    from tokenmill.model.kernels.triton import attention, hopper

    shape, output = inputs.shape, torch.full(inputs.q.shape, float("nan"), device="cuda", dtype=inputs.q.dtype)
    own = partial(hopper.attend_prompts, inputs.q, inputs.kv, output, inputs.scores, num_programs)
    other = partial(attention.attend_prompts, inputs.q, inputs.kv, output, inputs.scores)
    wanted = inputs.expected()
    errors, results = [], []
    for work in (other, own, own):
        output.fill_(float("nan"))
        work()
        errors.append(float((output.float() - wanted).norm() / wanted.norm()))
        results.append(output.clone())
    is_right = errors[1] < LARGEST_ERROR and torch.equal(*results[1:])
    text = f"{name:8} {shape.name:24} error {errors[1]:.2e} (other {errors[0]:.2e})"
    return ("ok   " if is_right else "BAD  ") + text + (times(shape, other, own) if shape.is_timed else "")


def run_others() -> None:
    """Torch's own attention without pages, as a measure."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = torch.nn.functional.scaled_dot_product_attention
    with device_alone():
        qkv = [torch.randn(1, 16, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            try:
                with sdpa_kernel(backend):
                    ms = median_ms(partial(attend, *qkv, is_causal=True))
                print(f"ok   {backend.name}: {ms:.3f} ms {LONG.operations / ms / 1e9:.0f} Tflop/s", flush=True)
            except RuntimeError as error:
                print(f"BAD  {backend.name}: {error}"[:300], flush=True)


def median_ms(work: Callable[[], Any]) -> float:
    """Median milliseconds of some work, by events."""
    found = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        work()
        begin.record()
        for _ in range(REPEATS):
            work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / REPEATS)
    return sorted(found)[len(found) // 2]


def compile_ahead(shapes: Sequence[Shape]) -> None:
    """Compile what the shapes need, without a launch."""
    from tokenmill.model.kernels.triton import attention, hopper

    kernels = [(attention, "_attend"), (hopper, "_attend_prompts")]
    kept = [getattr(module, name) for module, name in kernels]
    for (module, name), kernel in zip(kernels, kept, strict=True):
        setattr(module, name, Warming(kernel))
    try:
        for shape in shapes:
            inputs = Inputs(replace(shape, new=(64,), cached=(0,)), 0)
            output = torch.empty(inputs.q.shape, device="cuda", dtype=inputs.q.dtype)
            attention.attend_prompts(inputs.q, inputs.kv, output, inputs.scores)
            hopper.attend_prompts(inputs.q, inputs.kv, output, inputs.scores, 1)
    finally:
        for (module, name), kernel in zip(kernels, kept, strict=True):
            setattr(module, name, kernel)


class Warming:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **own: self._kernel.warmup(*args, grid=grid, **own)


def times(shape: Shape, other: Callable[[], None], own: Callable[[], None]) -> str:
    """Milliseconds of both, in turns, and the host's time to launch."""
    found: dict[Callable[[], None], list[float]] = {other: [], own: []}
    for work in (other, own, other, own):
        found[work].append(median_ms(work))
    before = time.perf_counter()
    for _ in range(LAUNCHES):
        own()
    host = (time.perf_counter() - before) / LAUNCHES * 1e6
    torch.cuda.synchronize()
    (first, first_rate), (second, second_rate) = ((min(ms), shape.operations / min(ms) / 1e9) for ms in found.values())
    return (
        f" | other {first:.3f} ms {first_rate:.0f} Tflop/s | own {second:.3f} ms {second_rate:.0f} Tflop/s"
        f" | x{first / second:.2f} | host {host:.0f} us"
    )


def follow(name: str, until: float) -> bool:
    """Run a case and print its lines; kill it where it holds the device too long, or at the end of the time."""
    command = [sys.executable, "-m", "tools.gpu.sweep_prompts", "--here", name]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    timers = [threading.Timer(until - time.monotonic(), process.kill)]
    timers[0].start()
    rest, is_right = [], True
    for line in process.stdout or ():
        if line.startswith("HELD"):
            timers.append(threading.Timer(HELD_SECONDS, process.kill))
            timers[-1].start()
        elif line.startswith(("ok ", "BAD ")):
            print(line, end="", flush=True)
            is_right &= line.startswith("ok ")
        else:
            rest.append(line)
    code = process.wait()
    for timer in timers:
        timer.cancel()
    if code != 0:
        print(f"FAILED {name}, exit code {code}: {''.join(rest)[-1500:]}", flush=True)
    return is_right and code == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Start all cases; those that fail or hang end alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=100, help="after which cases are killed")
    parser.add_argument("--only", default=",".join((*CASES, OTHERS)), help="cases, with commas between")
    parser.add_argument("--here", default="", help="run one case in this process")
    options = parser.parse_args(argv)
    if options.here:
        run_others() if options.here == OTHERS else run_case(options.here)
        return 0
    until = time.monotonic() + options.seconds
    names = options.only.split(",")
    with ThreadPoolExecutor(len(names)) as threads:
        results = list(threads.map(partial(follow, until=until), names))
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
