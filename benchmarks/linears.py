"""Time the linear layers of one step in each format, against the limits of the machine and against torch.

    python benchmarks/linears.py [--threads 2] [--rows 1,8,32,512] [--repeats 5] [--isa avx512bf16]

The matrices are those of Qwen3-0.6B: each of twelve layers' own, so that the caches hold few weights, and the output
head with its argmax where a step has few rows. A step is 28 such layers, from the smallest time of each matrix. The
limit is the larger of bytes / bandwidth and operations / rate, probed before each row count: bandwidth is the better of
torch's sum over memory and of one long matrix read by one row, rate that of torch's product of large bf16 matrices,
doubled for integers. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.native_weight import PackedWeight
from tokenmill.model.kernels.protocol import WeightRole
from tokenmill.model.quantization.packed import Mxfp4Rows, PackedFormat, Rows

HIDDEN, VOCABULARY, LAYERS, COPIES = 1024, 151_936, 28, 12
SHAPES = {"qkv": (4096, HIDDEN), "o": (HIDDEN, 2048), "gate_up": (6144, HIDDEN), "down": (HIDDEN, 3072)}
FEW_ROWS = 64


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls; a first one is not counted."""
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def drawn(rows: int, size: int, format: PackedFormat) -> Rows | torch.Tensor:
    """A random matrix; in mxfp4 one that is stored so."""
    if format is not PackedFormat.MXFP4:
        return torch.randn(rows, size) / size**0.5
    blocks = torch.randint(0, 256, (rows, size // 32, 16), dtype=torch.uint8)
    return Mxfp4Rows(blocks.numpy(), torch.randint(118, 122, (rows, size // 32), dtype=torch.uint8).numpy())


class TorchLayers:
    """The same matrices, row-major, for `functional.linear`."""

    def __init__(self) -> None:
        self.layers = {name: [torch.randn(shape).bfloat16() for _ in range(COPIES)] for name, shape in SHAPES.items()}
        self.head = torch.randn(VOCABULARY, HIDDEN).bfloat16()
        self.num_bytes = sum(2 * rows * size for rows, size in SHAPES.values())
        self.head_bytes = self.head.nbytes

    def run(self, name: str, x: torch.Tensor) -> None:
        """Every copy of a matrix once."""
        for weight in self.layers[name]:
            functional.linear(x, weight)

    def run_head(self, x: torch.Tensor) -> None:
        """The ids of the largest logits."""
        functional.linear(x, self.head).argmax(-1)


class NativeLayers:
    """The matrices in one format."""

    def __init__(self, format: PackedFormat, options: argparse.Namespace) -> None:
        kernels = load_kernels(options.threads, options.isa)
        if kernels is None:
            raise SystemExit("the native kernels are not built")

        def packed(rows: int, size: int, role: WeightRole = WeightRole.LINEAR) -> PackedWeight:
            matrix = PackedWeight(kernels, (rows, size), role, format)
            matrix.load_rows(0, drawn(rows, size, format))
            return matrix

        roles = {"gate_up": WeightRole.GATE_UP}
        self.layers = {
            name: [packed(*shape, roles.get(name, WeightRole.LINEAR)) for _ in range(COPIES)]
            for name, shape in SHAPES.items()
        }
        self.head = packed(VOCABULARY, HIDDEN)
        self.num_bytes = sum(copies[0].num_bytes for copies in self.layers.values())
        self.head_bytes = self.head.num_bytes

    def run(self, name: str, x: torch.Tensor) -> None:
        """Every copy of a matrix once."""
        for matrix in self.layers[name]:
            matrix.gated(x) if name == "gate_up" else matrix.multiply(x)

    def run_head(self, x: torch.Tensor) -> None:
        """The ids of the largest logits."""
        self.head.argmax(x)


def limits(long: NativeLayers, repeats: int) -> tuple[float, float]:
    """Bytes and bf16 operations per second."""
    memory, matrix, row = torch.ones(64 << 20), torch.randn(2048, 2048).bfloat16(), torch.randn(1, HIDDEN).bfloat16()
    bandwidth = max(
        memory.nbytes / fastest(memory.sum, repeats), long.head_bytes / fastest(lambda: long.run_head(row), repeats)
    )
    return bandwidth, 2 * 2048**3 / fastest(lambda: matrix @ matrix, repeats)


def measure(layers: TorchLayers | NativeLayers, rows: int, speed: float, machine: tuple[float, float], repeats: int):
    """One step's milliseconds, and its share of what the machine allows; `speed`: operations per bf16 operation."""
    inputs = {name: torch.randn(rows, size).bfloat16() for name, (_, size) in SHAPES.items()}
    parts = {name: fastest(lambda n=name: layers.run(n, inputs[n]), repeats) / COPIES for name in SHAPES}
    seconds, num_bytes = LAYERS * sum(parts.values()), LAYERS * layers.num_bytes
    weights = LAYERS * sum(out_size * in_size for out_size, in_size in SHAPES.values())
    if rows <= FEW_ROWS:
        seconds += fastest(lambda: layers.run_head(torch.randn(rows, HIDDEN).bfloat16()), repeats)
        num_bytes, weights = num_bytes + layers.head_bytes, weights + VOCABULARY * HIDDEN
    bandwidth, rate = machine
    limit = max(num_bytes / bandwidth, 2 * weights * rows / (rate * speed))
    return {
        "ms": round(seconds * 1e3, 2),
        "limit_ms": round(limit * 1e3, 2),
        "share_of_limit": round(limit / seconds, 3),
        "us": {name: round(part * 1e6, 1) for name, part in parts.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1,8,32,512")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--isa", default="")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    native = {f"native {format.name.lower()}": NativeLayers(format, options) for format in PackedFormat}
    subjects: dict[str, TorchLayers | NativeLayers] = {"torch bf16": TorchLayers(), **native}
    results: list[dict[str, object]] = []
    for rows in map(int, options.rows.split(",")):
        machine = limits(native["native bf16"], options.repeats)
        print(f"{rows} rows; memory {machine[0] / 1e9:.0f} GB/s, bf16 {machine[1] / 1e12:.2f} Tflop/s")
        for name, layers in subjects.items():
            speed = 2.0 if "int" in name or "mxfp4" in name else 1.0
            found = measure(layers, rows, speed, machine, options.repeats)
            results.append({"kernels": name, "rows": rows, **found})
            print(
                f"  {name:20} {found['ms']:9.2f} ms   limit {found['limit_ms']:8.2f} ms   {found['share_of_limit']:.0%}"
            )
    print(json.dumps({"threads": options.threads, "results": results}))


if __name__ == "__main__":
    main()
