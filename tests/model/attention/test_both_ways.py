"""Attention to tokens before and after, against masks written out: on every backend, instruction set and window."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.attention.test_native import drawn
from tests.model.kernels.native import every_isa, kernels
from tests.paging import PagedRequests
from tokenmill.model.attention.backends.cpu import CpuAttention
from tokenmill.model.attention.backends.native import NativeAttention
from tokenmill.model.attention.backends.reference import ReferenceAttention
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.packed_kv import PackedKV
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.attention.tensor_kv import HeadMajorKV
from tokenmill.platform.host_arrays import host_array

WINDOWS = ((None, None), (65, 64), (1, 0), (3, 9), (200, 5), (None, 30), (17, None))


def step(
    rng: np.random.Generator, heads: int, head_dim: int, lengths: list[int]
) -> tuple[AttentionSpec, PagedRequests, ForwardBatch, torch.Tensor]:
    """Whole requests of these lengths, and their projections of q, k and v."""
    spec = AttentionSpec(1, heads, heads, head_dim, sees_ahead=True)
    requests = PagedRequests([[0] * length for length in lengths], 16, rng)
    batch = requests.batch([(request, length) for request, length in enumerate(lengths)])
    return spec, requests, batch, drawn(sum(lengths), 3 * heads * head_dim)


def by_masks(qkv: torch.Tensor, heads: int, lengths: list[int], layer: AttentionLayer) -> torch.Tensor:
    """The slow way, [T, heads * head_dim] float64."""
    found = []
    for own in qkv.double().split(lengths):
        q, k, v = own.view(len(own), 3, heads, -1).permute(1, 2, 0, 3)
        away = torch.arange(len(own)) - torch.arange(len(own))[:, None]
        hidden = torch.zeros_like(away, dtype=torch.bool)
        if layer.window is not None:
            hidden |= away <= -layer.window
        if layer.ahead is not None:
            hidden |= away > layer.ahead
        weights = (q @ k.transpose(1, 2) * layer.scale).masked_fill(hidden, -torch.inf).softmax(-1)
        found.append((weights @ v).transpose(0, 1).flatten(1))
    return torch.cat(found)


def lengths_of(rng: np.random.Generator) -> list[int]:
    return [1, *rng.choice([2, 16, 40, 70, 130, 300], 3).tolist(), int(rng.integers(1, 200))]


@pytest.mark.parametrize(("window", "ahead"), WINDOWS)
@pytest.mark.parametrize("backend", [ReferenceAttention, CpuAttention])
def test_torch_attends_both_ways(
    backend: type, window: int | None, ahead: int | None, rng: np.random.Generator
) -> None:
    lengths, heads = lengths_of(rng), int(rng.choice([1, 3, 4]))
    spec, requests, batch, qkv = step(rng, heads, 8, lengths)
    layer = AttentionLayer(0, 0.4, window, ahead=ahead)
    kv = HeadMajorKV(spec, requests.num_pages, 16, "float32", "cpu")
    for tensor in kv.tensors:
        tensor.fill_(torch.nan)
    attention = backend(spec, kv)
    got = attention.forward(qkv.float(), layer, attention.plan(batch))
    torch.testing.assert_close(got.double(), by_masks(qkv, heads, lengths, layer), rtol=1e-4, atol=1e-5)


@every_isa
@pytest.mark.parametrize(("window", "ahead"), WINDOWS)
def test_the_native_one_attends_both_ways(
    isa: str, window: int | None, ahead: int | None, rng: np.random.Generator
) -> None:
    lengths = [*lengths_of(rng), int(rng.choice([511, 600, 1100]))]
    heads, head_dim = int(rng.choice([1, 3, 4])), int(rng.choice([16, 32, 64]))
    spec, requests, batch, qkv = step(rng, heads, head_dim, lengths)
    layer = AttentionLayer(0, head_dim**-0.5, window, ahead=ahead)

    def run(threads: int, own: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        kv = PackedKV(spec, requests.num_pages, 16, "bfloat16", "cpu")
        for tensor in kv.tensors:
            host_array(tensor)[...] = 0x7FC0  # NaN
        attention = NativeAttention(spec, kv, kernels(isa, threads))
        return attention.forward(own.clone(), layer, attention.plan(batch))

    together = run(int(rng.integers(1, 4)), qkv, batch)
    expected = by_masks(qkv, heads, lengths, layer)
    torch.testing.assert_close(together.double(), expected, rtol=2**-6, atol=0.02)
    for request, (own, found) in enumerate(zip(qkv.split(lengths), together.split(lengths), strict=True)):
        requests.computed[request] = 0
        alone = requests.batch([(request, lengths[request])])
        assert torch.equal(run(1, own, alone), found)


@every_isa
def test_a_broken_token_reaches_those_that_see_it_alone(isa: str, rng: np.random.Generator) -> None:
    spec, requests, batch, qkv = step(rng, 2, 32, [300])
    qkv[150, 2 * 64 :] = torch.nan  # its value
    attention = NativeAttention(spec, PackedKV(spec, requests.num_pages, 16, "bfloat16", "cpu"), kernels(isa))
    got = attention.forward(qkv, AttentionLayer(0, 0.2, 65, ahead=64), attention.plan(batch))
    is_broken = got.isnan().any(-1)
    assert is_broken.nonzero().flatten().tolist() == list(range(150 - 64, 150 + 65))
