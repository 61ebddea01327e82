"""The tower's native parts against its torch parts, on every instruction set; bits do not depend on threads."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from tests.model.kernels.native import every_isa, kernels
from tokenmill.model.vision.native_parts import NativeParts
from tokenmill.model.vision.spec import VisionSpec
from tokenmill.model.vision.tower import Tower
from tokenmill.model.vision.tower_parts import TorchParts
from tokenmill.model.vision.tower_shapes import tower_shapes

SPEC = VisionSpec(
    depth=3,
    hidden_size=128,
    intermediate_size=200,
    num_heads=2,
    out_size=64,
    deepstack=(1,),
    table_side=6,
    theta=10_000.0,
    patch_size=16,
    merge=2,
    frames=2,
    sections=(24, 20, 20),
    min_pixels=1024,
    max_pixels=1 << 20,
    min_video_pixels=1024,
    max_video_pixels=1 << 20,
    frame_tokens=0,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    image_token_id=1,
    video_token_id=2,
    start_token_id=3,
    end_token_id=4,
)


def weights_of(spec: VisionSpec) -> dict[str, torch.Tensor]:
    drawn = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in tower_shapes(spec).items()}
    drawn |= {name: 1 + 0.1 * one for name, one in drawn.items() if "norm" in name and name.endswith("weight")}
    drawn["patch_embed.proj.weight"] = drawn["patch_embed.proj.weight"].flatten(1) / 30
    return {name: one.bfloat16() for name, one in drawn.items()}


@every_isa
@pytest.mark.parametrize("num_heads", [2, 8, 1])  # heads of 64; of 16; of 128
def test_native_parts_are_the_torch_parts(isa: str, num_heads: int, rng: np.random.Generator) -> None:
    spec = msgspec.structs.replace(SPEC, num_heads=num_heads)
    check(spec, isa, rng, (4, 6))


@every_isa
def test_heads_that_the_kernels_do_not_take_are_padded(isa: str, rng: np.random.Generator) -> None:
    check(msgspec.structs.replace(SPEC, hidden_size=144), isa, rng, (8, 4))  # heads of 72, as in the 8B model


@every_isa
def test_more_patches_than_a_split_of_keys(isa: str, rng: np.random.Generator) -> None:
    check(msgspec.structs.replace(SPEC, depth=2), isa, rng, (26, 30))


@every_isa
@pytest.mark.parametrize("grid", [(4, 6), (10, 18)])
def test_windows_and_gated_blocks_as_in_qwen25(isa: str, grid: tuple[int, int], rng: np.random.Generator) -> None:
    layers = {"is_gated": True, "deepstack": (), "window": 2, "full_blocks": (1,), "table_side": 0}
    check(msgspec.structs.replace(SPEC, **layers), isa, rng, grid)


@every_isa
def test_averaged_patches_as_in_gemma3(isa: str, rng: np.random.Generator) -> None:
    pooled = {"is_pooled": True, "deepstack": (), "frames": 1, "theta": 0.0, "sections": (), "merge": 3}
    check(msgspec.structs.replace(SPEC, hidden_size=144, **pooled), isa, rng, (6, 6))


def check(spec: VisionSpec, isa: str, rng: np.random.Generator, grid: tuple[int, int]) -> None:
    weights = weights_of(spec)
    pixels = rng.integers(0, 256, (1, 16 * grid[0], 16 * grid[1], 3), dtype=np.uint8)
    heads = spec.num_heads, spec.is_gated
    found = Tower(spec, NativeParts(kernels(isa), weights, *heads)).encode(torch.from_numpy(pixels))
    wide = {name: one.float() for name, one in weights.items()}
    exact = Tower(spec, TorchParts(wide, *heads)).encode(torch.from_numpy(pixels))
    plain = Tower(spec, TorchParts(weights, *heads)).encode(torch.from_numpy(pixels))
    # As far from float32 as torch is in bfloat16, or not much more: the angles are rounded too.
    ours, theirs = (found.float() - exact).square().mean().sqrt(), (plain.float() - exact).square().mean().sqrt()
    assert ours <= 2 * theirs + 1e-4, (ours, theirs)
    threads = Tower(spec, NativeParts(kernels(isa, 3), weights, *heads)).encode(torch.from_numpy(pixels))
    assert torch.equal(threads, found)
