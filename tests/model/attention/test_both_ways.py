"""Attention to tokens before and after, against masks written out: on every backend, instruction set and window."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from tests.model.attention.test_native import drawn
from tests.model.kernels.native import every_isa, kernels
from tests.paging import PagedRequests, drawn_sights
from tokenmill.model.attention.backends.cpu import CpuAttention
from tokenmill.model.attention.backends.native import NativeAttention
from tokenmill.model.attention.backends.reference import ReferenceAttention
from tokenmill.model.attention.batch import ForwardBatch, MediaTokens
from tokenmill.model.attention.packed_kv import PackedKV
from tokenmill.model.attention.protocol import AttentionLayer, AttentionSpec
from tokenmill.model.attention.tensor_kv import HeadMajorKV
from tokenmill.platform.host_arrays import host_array

WINDOWS = ((None, None), (65, 64), (1, 0), (3, 9), (200, 5), (None, 30), (17, None))
HAVE_SLOPES = (False, True)


def slopes_of(rng: np.random.Generator, heads: int) -> tuple[float, ...]:
    """Slopes as trained models have them: of the steepest a text's ends do not see each other."""
    return tuple((2.0 ** -rng.uniform(1, 8, heads)).tolist())


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
        scores = q @ k.transpose(1, 2) * layer.scale
        if layer.slopes is not None:
            scores -= torch.tensor(layer.slopes).double()[:, None, None] * away.abs()
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        found.append((weights @ v).transpose(0, 1).flatten(1))
    return torch.cat(found)


def lengths_of(rng: np.random.Generator) -> list[int]:
    return [1, *rng.choice([2, 16, 40, 70, 130, 300], 3).tolist(), int(rng.integers(1, 200))]


@pytest.mark.parametrize("has_slopes", HAVE_SLOPES)
@pytest.mark.parametrize(("window", "ahead"), WINDOWS)
@pytest.mark.parametrize("backend", [ReferenceAttention, CpuAttention])
def test_torch_attends_both_ways(
    backend: type, window: int | None, ahead: int | None, has_slopes: bool, rng: np.random.Generator
) -> None:
    lengths, heads = lengths_of(rng), int(rng.choice([1, 3, 4]))
    spec, requests, batch, qkv = step(rng, heads, 8, lengths)
    layer = AttentionLayer(0, 0.4, window, ahead=ahead, slopes=slopes_of(rng, heads) if has_slopes else None)
    kv = HeadMajorKV(spec, requests.num_pages, 16, "float32", "cpu")
    for tensor in kv.tensors:
        tensor.fill_(torch.nan)
    attention = backend(spec, kv)
    got = attention.forward(qkv.float(), layer, attention.plan(batch))
    torch.testing.assert_close(got.double(), by_masks(qkv, heads, lengths, layer), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [1, 2])
def test_short_texts_of_one_length_are_attended_together(group: int, rng: np.random.Generator) -> None:
    """Many, of which each has the same bits alone; keys and values are never read from the pages."""
    length, heads = int(rng.integers(2, 128)), 4
    lengths = [length] * int(rng.integers(20, 40)) + [length + 1, 200, length]
    spec = AttentionSpec(1, heads, heads // group, 8, sees_ahead=True)
    requests = PagedRequests([[0] * own for own in lengths], 16, rng)
    batch = requests.batch([(request, own) for request, own in enumerate(lengths)])
    qkv = drawn(sum(lengths), (heads + 2 * heads // group) * 8).float()
    layer = AttentionLayer(0, 0.4, None, ahead=None)

    def run(own: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        attention = CpuAttention(spec, HeadMajorKV(spec, requests.num_pages, 16, "float32", "cpu"))
        return attention.forward(own, layer, attention.plan(batch))

    together = run(qkv, batch)
    q, k, v = qkv.double().view(len(qkv), -1, 8).split([heads, heads // group, heads // group], 1)
    repeated = torch.cat([q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)], 1).flatten(1)
    torch.testing.assert_close(together.double(), by_masks(repeated, heads, lengths, layer), rtol=1e-4, atol=1e-5)
    for request, (own, found) in enumerate(zip(qkv.split(lengths), together.split(lengths), strict=True)):
        requests.computed[request] = 0
        assert torch.equal(run(own, requests.batch([(request, lengths[request])])), found)


@every_isa
@pytest.mark.parametrize("has_slopes", HAVE_SLOPES)
@pytest.mark.parametrize(("window", "ahead"), WINDOWS)
def test_the_native_one_attends_both_ways(
    isa: str, window: int | None, ahead: int | None, has_slopes: bool, rng: np.random.Generator
) -> None:
    lengths = [*lengths_of(rng), int(rng.choice([511, 600, 1100]))]
    heads, head_dim = int(rng.choice([1, 3, 4])), int(rng.choice([16, 32, 64]))
    spec, requests, batch, qkv = step(rng, heads, head_dim, lengths)
    slopes = slopes_of(rng, heads) if has_slopes else None
    layer = AttentionLayer(0, head_dim**-0.5, window, ahead=ahead, slopes=slopes)

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


class Images:
    """Requests with images, whose tokens see each other, in two steps; the first ends between images."""

    def __init__(self, rng: np.random.Generator, group: int, head_dim: int) -> None:
        self.lengths = [*lengths_of(rng), int(rng.choice([511, 600, 1100]))]
        self.cuts = [int(rng.integers(0, length)) for length in self.lengths]
        sights = [
            np.concatenate([drawn_sights(rng, 0, cut), drawn_sights(rng, cut, length)])
            for cut, length in zip(self.cuts, self.lengths, strict=True)
        ]
        self.sights = [torch.from_numpy(one) for one in sights]
        self.heads, self.kv_heads, self.head_dim = 2 * group, 2, head_dim
        self.spec = AttentionSpec(1, self.heads, self.kv_heads, head_dim, spans_see_ahead=True)
        self.requests = PagedRequests([[0] * length for length in self.lengths], 16, rng)
        width = (self.heads + 2 * self.kv_heads) * head_dim
        self.qkv = [drawn(length, width) for length in self.lengths]

    def expected(self, request: int, layer: AttentionLayer) -> torch.Tensor:
        """The slow way, [length, heads * head_dim] float64."""
        own = self.qkv[request].double().view(self.lengths[request], -1, self.head_dim).transpose(0, 1)
        q, k, v = own.split([self.heads, self.kv_heads, self.kv_heads])
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 0) for part in (k, v))
        places = torch.arange(self.lengths[request])
        hidden = places > self.sights[request][:, None]
        if layer.window is not None:
            hidden |= places <= places[:, None] - layer.window
        weights = (q @ k.transpose(1, 2) * layer.scale).masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    def run(
        self, attention: ReferenceAttention | CpuAttention | NativeAttention, layer: AttentionLayer, who: list[int]
    ) -> list[torch.Tensor]:
        """The outputs of some requests, which run beside each other in two steps."""
        found: list[list[torch.Tensor]] = [[] for _ in who]
        dtype = torch.bfloat16 if isinstance(attention, NativeAttention) else torch.float32
        for bounds in ([(0, self.cuts[one]) for one in who], [(self.cuts[one], self.lengths[one]) for one in who]):
            chunks = [(one, end - start) for one, (start, end) in zip(who, bounds, strict=True) if end > start]
            if not chunks:
                continue
            batch = self.requests.batch(chunks)
            of = {one: slice(*own) for one, own in zip(who, bounds, strict=True)}
            sights = torch.cat([self.sights[one][of[one]] for one, _ in chunks])
            batch = msgspec.structs.replace(batch, media=MediaTokens(None, torch.zeros(0), None, sights))
            qkv = torch.cat([self.qkv[one][of[one]] for one, _ in chunks]).to(dtype)
            outputs = attention.forward(qkv, layer, attention.plan(batch)).split([count for _, count in chunks])
            for (one, _), output in zip(chunks, outputs, strict=True):
                found[who.index(one)].append(output)
        for one in who:
            self.requests.computed[one] = 0
        return [torch.cat(own) for own in found]


@pytest.mark.parametrize("window", [None, 1, 7, 65])
@pytest.mark.parametrize("backend", [ReferenceAttention, CpuAttention])
def test_torch_lets_tokens_of_one_image_see_each_other(
    backend: type, window: int | None, rng: np.random.Generator
) -> None:
    images = Images(rng, int(rng.choice([1, 3])), 8)
    layer = AttentionLayer(0, 0.4, window)
    kv = HeadMajorKV(images.spec, images.requests.num_pages, 16, "float32", "cpu")
    for tensor in kv.tensors:
        tensor.fill_(torch.nan)
    for request, got in enumerate(images.run(backend(images.spec, kv), layer, list(range(len(images.lengths))))):
        torch.testing.assert_close(got.double(), images.expected(request, layer), rtol=1e-4, atol=1e-5)


@every_isa
@pytest.mark.parametrize("window", [None, 1, 7, 65])
def test_the_native_one_lets_tokens_of_one_image_see_each_other(
    isa: str, window: int | None, rng: np.random.Generator
) -> None:
    images = Images(rng, int(rng.choice([1, 3, 4])), int(rng.choice([16, 32, 64])))
    layer = AttentionLayer(0, images.head_dim**-0.5, window)

    def run(threads: int, who: list[int]) -> list[torch.Tensor]:
        kv = PackedKV(images.spec, images.requests.num_pages, 16, "bfloat16", "cpu")
        for tensor in kv.tensors:
            host_array(tensor)[...] = 0x7FC0  # NaN
        return images.run(NativeAttention(images.spec, kv, kernels(isa, threads)), layer, who)

    together = run(int(rng.integers(1, 4)), list(range(len(images.lengths))))
    for request, got in enumerate(together):
        torch.testing.assert_close(got.double(), images.expected(request, layer), rtol=2**-6, atol=0.02)
        assert torch.equal(run(1, [request])[0], got)
