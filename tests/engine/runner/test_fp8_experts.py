"""Experts in eight-bit floats in a model: the tokens of an engine, and the parts of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.engine.runner.fake_platform import FakePlatform
from tests.engine.runner.test_on_device import assert_near, run, running, tokens
from tests.model.kernels.gpu import DEVICE
from tests.model.kernels.test_triton_fp8_experts import mixture
from tests.seeding import seed_for
from tokenmill.core.messages import TokenOutput
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.parallel.devices.collective import DeviceCollective
from tokenmill.model.kernels.fp8 import FP8
from tokenmill.model.kernels.protocol import Gate
from tokenmill.model.kernels.triton.kernels import TritonKernels
from tokenmill.model.sharding.shard import Shard
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import plan_model

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")

SEED = seed_for(__name__)
# No matrix but those of experts has the sizes that products in eight-bit floats ask for.
SHAPE = {"hidden_size": 40, "num_hidden_layers": 1, "num_experts": 4, "vocab_size": 277}
SCALE = 2.0**-10


def change_experts(folder: Path, change: Any) -> None:
    """Change the matrices of a checkpoint's experts."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if ".experts." in name:
            tensors[name] = change(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})


def with_known_scale(weight: torch.Tensor) -> torch.Tensor:
    """Rows whose largest number is the format's largest, times a power of two that bfloat16 keeps."""
    weight = weight.clamp(-0.4, 0.4)
    weight[:, 3] = 448 * SCALE
    return weight.bfloat16()


def greedy(folder: Path, prompts: list[list[int]], **options: Any) -> tuple[FakePlatform, list[list[TokenOutput]]]:
    """An engine's outputs on a device, with log probabilities."""
    params = [SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)] * len(prompts)
    platform = FakePlatform()
    with running(folder, platform, dtype="bfloat16", async_scheduling=True, **options) as engine:
        return platform, run(engine, prompts, params)


def test_tokens_are_those_of_experts_rounded_and_widened(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    prompts = [np.random.default_rng(SEED + length).integers(0, 250, length).tolist() for length in (6, 1, 20)]
    folders = [make_checkpoint(tmp_path / name, "qwen3_moe", seed=SEED, **SHAPE) for name in ("floats", "rounded")]
    for folder in folders:
        change_experts(folder, with_known_scale)
    change_experts(folders[1], lambda weight: ((weight.float() / SCALE).to(FP8).float() * SCALE).bfloat16())
    device, found = greedy(folders[0], prompts, quantization="fp8")
    _, expected = greedy(folders[1], prompts)
    _, plain = greedy(folders[0], prompts[2:])
    assert device.replays > 0, "decodes run in graphs"
    assert tokens(found) == tokens(expected)
    for got, want in zip(found, expected, strict=True):
        assert_near([each.logprobs for each in got], [each.logprobs for each in want])
    assert [each.logprobs for each in found[2]] != [each.logprobs for each in plain[0]], "they are rounded"


def test_each_rank_rounds_its_part_of_each_expert(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe", seed=SEED, **SHAPE)
    architecture, tensors = read_architecture(folder), load_file(folder / "model.safetensors")
    kernels = TritonKernels("float32", "cpu", fp8=True)
    x, weights = torch.randn(7, SHAPE["hidden_size"]), torch.rand(7, 2)
    chosen = torch.from_numpy(np.stack([rng.permutation(SHAPE["num_experts"])[:2] for _ in range(7)]))
    for rank in range(2):
        plan = plan_model(folder, architecture, kernels, collective=DeviceCollective(Shard(rank, 2, sums=True), None))
        experts = plan.load().layers[0].mlp.experts
        own = slice(12 * rank, 12 * (rank + 1))
        matrices = []
        for expert in range(SHAPE["num_experts"]):
            gate, up, down = (
                tensors[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down")
            )
            matrices.append((torch.cat([gate[own], up[own]]), down[:, own]))
        want = mixture(x, weights, chosen, (matrices, None, Gate.SILU), lambda rows: rows)
        torch.testing.assert_close(experts.mix(x, weights, chosen), want, rtol=1e-4, atol=1e-4)
        held = sum(matrix.num_bytes for matrix in (*experts.gate_up, *experts.down))
        assert held == 4 * (3 * 40 * 12 + 4 * (2 * 12 + 40)), "half of the numbers, and a scale for each output"
