"""Eight-bit products on the device: against float64, and how long they take beside bfloat16.

    python -m tools.gpu.fp8_check [--device cpu] [--seconds 60]

First the experts of a layer of Qwen3-30B-A3B, then the products of Qwen3-0.6B and Qwen3-14B, with several numbers of
tokens: the error against the same rounded values in float64 (of few rows the weights alone are rounded), the error of
the rounding itself, and the times: of the experts beside their bytes, of the product, of the rounding of the
activations, and of the same in bfloat16. A row each as it comes, one line of JSON last.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tools.gpu.machine import copy_rate, device_seconds, make_platform
from tools.gpu.mixtures import DRY, DRY_TOKENS, QWEN3_30B_A3B, TOKENS, compare_mixtures, largest_error
from tools.gpu.rows import Row, Rows, guarded, parse

# Outputs and inputs: qkv, gate and up, down.
SIZES = ((4096, 1024), (6144, 1024), (1024, 3072), (7168, 5120), (34816, 5120), (5120, 17408))
COUNTS = (1, 16, 64, 256, 8192)
DRY_SIZES, DRY_COUNTS = ((32, 48),), (1, 5)
# Rows of a product that are compared.
MOST_COMPARED = 64
# Of the norm of the result: sums are of less than float32's precision with `use_fast_accum`, and rounded to bfloat16.
LARGEST_ERROR = 0.01


def main(argv: Sequence[str] | None = None) -> int:
    """Check until it is done or the time is up; 1 if a product is wrong."""
    options = parse(__doc__ or "", argv, 60)
    platform = make_platform(options.device)
    is_dry = platform.name != "cuda"
    sizes, counts = (DRY_SIZES, DRY_COUNTS) if is_dry else (SIZES, COUNTS)
    mixture = (DRY, DRY_TOKENS) if is_dry else (QWEN3_30B_A3B, TOKENS)
    with Rows(options.seconds) as rows:
        rows.take(guarded("fp8 experts", compare_mixtures(*mixture, platform, copy_rate(platform))))
        for out_size, in_size in sizes:
            for tokens in counts:
                what = f"fp8 product, {tokens} x {in_size} by {out_size}"
                if rows.has_time:
                    rows.take(guarded(what, compare(what, (tokens, out_size, in_size), platform)))
    return int(rows.has_failed)


def compare(what: str, shape: tuple[int, int, int], platform: Any) -> Iterator[Row]:
    """The row of one product.

    Args:
        shape: tokens, outputs, inputs.
    """
    from tokenmill.model.kernels.triton.few_rows import suits
    from tokenmill.model.kernels.triton.fp8 import RoundedRows, quantize_rows
    from tokenmill.model.kernels.triton.kernels import TritonFp8Weight

    tokens, out_size, in_size = shape
    device = platform.device
    dense = (torch.randn(out_size, in_size, device=device) / in_size**0.5).bfloat16()
    x = torch.randn(tokens, in_size, device=device).bfloat16()
    # Rows of unlike magnitude: a scale that belongs to another row would show.
    x *= torch.logspace(-3, 3, tokens, device=device)[:, None].bfloat16()
    weight = TritonFp8Weight(out_size, in_size, device, RoundedRows())
    weight.load_rows(0, dense)
    picked = torch.randperm(tokens, device=device)[:MOST_COMPARED]
    got = weight.multiply(x)[picked].double()
    taken = x[picked].double()
    if not suits(x, weight.weight, False):
        values, scales = quantize_rows(x)
        taken = values[picked].double() * scales[picked]
    rounded = taken @ (weight.weight.double() * weight.scales).t()
    exact = x[picked].double() @ dense.double().t()
    # Row by row: the smallest must be as good as the largest.
    error, rounding = largest_error(got, rounded), largest_error(got, exact)
    row: Row = {"what": what, "error": error, "with_rounding": rounding, "passed": error < LARGEST_ERROR}
    whole = 1e6 * device_seconds(lambda: weight.multiply(x), platform)
    quantizing = 1e6 * device_seconds(lambda: quantize_rows(x), platform)
    half = 1e6 * device_seconds(lambda: torch.nn.functional.linear(x, dense), platform)
    row |= {"fp8_us": whole, "of_it_quantizing_us": quantizing, "bf16_us": half, "speedup": half / whole}
    yield row


if __name__ == "__main__":
    sys.exit(main())
