"""Time the encoding of an image: our tower, the same on torch, and transformers', beside what its products take.

    python benchmarks/vision.py [--size 512x512] [--turns 7] [--threads 2]

The tower is Qwen3-VL-2B's, with random weights in bfloat16. The limit is its multiplications at the better of the rates
that torch's and our own largest product of the same shapes reach in the same run. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers

from tokenmill.lab.bench.report import machine_facts
from tokenmill.model.kernels.select import select_kernels
from tokenmill.model.vision.spec import VisionSpec
from tokenmill.model.vision.tower import Tower, make_parts
from tokenmill.model.vision.tower_parts import TorchParts
from tokenmill.model.vision.tower_shapes import tower_shapes

SPEC = VisionSpec(
    depth=24,
    hidden_size=1024,
    intermediate_size=4096,
    num_heads=16,
    out_size=2048,
    deepstack=(5, 11, 17),
    table_side=48,
    theta=10_000.0,
    patch_size=16,
    merge=2,
    frames=2,
    sections=(24, 20, 20),
    min_pixels=65_536,
    max_pixels=16_777_216,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    min_video_pixels=4_096,
    max_video_pixels=25_165_824,
    frame_tokens=0,
    image_token_id=1,
    video_token_id=2,
    start_token_id=3,
    end_token_id=4,
)


def theirs() -> torch.nn.Module:
    """The same tower by transformers."""
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    config = transformers.Qwen3VLConfig().vision_config
    fields = {
        "depth": SPEC.depth,
        "hidden_size": SPEC.hidden_size,
        "intermediate_size": SPEC.intermediate_size,
        "num_heads": SPEC.num_heads,
        "out_hidden_size": SPEC.out_size,
        "num_position_embeddings": SPEC.table_side**2,
        "deepstack_visual_indexes": list(SPEC.deepstack),
    }
    for name, value in fields.items():
        setattr(config, name, value)
    config._attn_implementation = "sdpa"
    return modeling_qwen3_vl.Qwen3VLVisionModel(config).to(torch.bfloat16).eval()


def multiplications(patches: int) -> int:
    """Of the tower's products, and of attention."""
    shapes = tower_shapes(SPEC).items()
    merged = patches // SPEC.merge**2
    of_weights = sum(
        int(np.prod(shape)) * (merged if "merger" in name else patches)
        for name, shape in shapes
        if name.endswith("weight") and len(shape) > 1 and "pos_embed" not in name
    )
    return of_weights + 2 * SPEC.depth * patches**2 * SPEC.hidden_size


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of one round of some work."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="512x512", metavar="WxH")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    width, height = map(int, given.size.split("x"))
    weights = {name: (0.02 * torch.randn(shape)).to(torch.bfloat16) for name, shape in tower_shapes(SPEC).items()}
    kernels, reason = select_kernels("auto", "cpu", "bfloat16", given.threads)
    ours, other = Tower(SPEC, make_parts(SPEC, dict(weights), kernels)), theirs()
    flat_weights = weights | {"patch_embed.proj.weight": weights["patch_embed.proj.weight"].flatten(1)}
    plain = Tower(SPEC, TorchParts(flat_weights, SPEC.num_heads))
    pixels = np.random.default_rng(0).integers(0, 256, (1, height, width, 3), np.uint8)
    grid = torch.tensor([[1, height // SPEC.patch_size, width // SPEC.patch_size]])
    patches = int(grid.prod())
    flat = torch.randn(patches, 3 * SPEC.frames * SPEC.patch_size**2).to(torch.bfloat16)
    x, w = torch.randn(patches, 1024).to(torch.bfloat16), torch.randn(4096, 1024).to(torch.bfloat16)
    packed = kernels.linear_weight(4096, 1024)
    packed.load_rows(0, w)
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.encode(pixels),
        "torch": lambda: plain.encode(pixels),
        "transformers": lambda: other(flat, grid_thw=grid),
        "torch_product": lambda: [torch.nn.functional.linear(x, w) for _ in range(8)],
        "our_product": lambda: [packed.multiply(x) for _ in range(8)],
    }
    found: dict[str, list[float]] = {name: [] for name in works}
    with torch.inference_mode():
        for work in works.values():
            work()
        for turn in range(given.turns):
            for name in list(works)[:: 1 if turn % 2 else -1]:
                found[name].append(seconds_of(works[name]))
    products = {name: found.pop(name) for name in ("torch_product", "our_product")}
    rates = {name: 8 * patches * 1024 * 4096 / min(own) for name, own in products.items()}
    document = {
        "benchmark": "vision",
        "size": given.size,
        "patches": patches,
        "kernels": reason,
        "seconds": {name: statistics.median(own) for name, own in found.items()},
        "spread": {name: [min(own), max(own)] for name, own in found.items()},
        "multiplications": multiplications(patches),
        "multiplications_per_second": rates,
        "limit_seconds": multiplications(patches) / max(rates.values()),
        "machine": machine_facts(),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
