"""Layers with heads of several shapes: a memory for each group, and layers that read the KV of another one."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from tests.canonical import export, import_, tensors_of
from tests.paging import PagedRequests, make_attention, random_schedule, unrotated
from tokenmill.model.attention.groups import GroupedAttention
from tokenmill.model.attention.protocol import AttentionBackend, AttentionLayer, AttentionSpec, GroupedKV
from tokenmill.model.kernels.heads import HeadNorms
from tokenmill.model.kernels.native import load_kernels

SMALL, LARGE = AttentionSpec(2, 4, 2, 32), AttentionSpec(1, 4, 1, 512)
BOTH = msgspec.structs.replace(SMALL, others=(LARGE,))
BACKENDS = ("reference", "cpu", "native")
LENGTHS = [1, 40, 70]


def backend(name: str, spec: AttentionSpec, num_pages: int) -> AttentionBackend:
    native = load_kernels(1)
    if name == "native" and native is None:
        pytest.skip("the native kernels are not built here")
    return make_attention(name, spec, num_pages, 16, torch.bfloat16, native=native)


def layer(spec: AttentionSpec, index: int, **facts: int | bool) -> AttentionLayer:
    ones = torch.ones(spec.head_dim, dtype=torch.bfloat16)
    norms = HeadNorms(ones, ones, 1e-6, v=ones)
    tables = unrotated(128, spec.head_dim, torch.bfloat16)
    return AttentionLayer(index, 0.2, 20, norms, tables, **facts)  # type: ignore[arg-type]


def drawn(spec: AttentionSpec, tokens: int) -> torch.Tensor:
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    return torch.randn(tokens, width).to(torch.bfloat16)


@pytest.mark.parametrize("name", BACKENDS)
def test_each_group_has_what_it_would_have_alone(name: str, rng: np.random.Generator) -> None:
    requests = PagedRequests([[0] * length for length in LENGTHS], 16, rng)
    together = backend(name, BOTH, requests.num_pages)
    alone = [backend(name, spec, requests.num_pages) for spec in BOTH.groups]
    assert isinstance(together, GroupedAttention)
    assert together.kv.num_bytes == sum(one.kv.num_bytes for one in alone)
    for chunks in random_schedule(LENGTHS, 24, rng):
        batch = requests.batch(chunks)
        plan, plans = together.plan(batch), [one.plan(batch) for one in alone]
        for group, index in ((0, 0), (1, 0), (0, 1)):
            spec = BOTH.groups[group]
            qkv = drawn(spec, len(batch.token_ids))
            want = alone[group].forward(qkv.clone(), layer(spec, index), plans[group])
            assert torch.equal(together.forward(qkv, layer(spec, index, group=group), plan), want)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_layer_that_reads_another_ones_kv_writes_nothing(name: str, rng: np.random.Generator) -> None:
    requests = PagedRequests([[0] * length for length in LENGTHS], 16, rng)
    attention = backend(name, LARGE, requests.num_pages)
    writer, reader = layer(LARGE, 0), layer(LARGE, 0, reads_only=True)
    for chunks in random_schedule(LENGTHS, 24, rng):
        batch = requests.batch(chunks)
        plan, qkv = attention.plan(batch), drawn(LARGE, len(batch.token_ids))
        queries = qkv[:, : LARGE.num_heads * LARGE.head_dim].clone()
        want = attention.forward(qkv, writer, plan)
        before = [tensor.clone() for tensor in tensors_of(attention.kv)]
        assert torch.equal(attention.forward(queries, reader, plan), want)
        assert all(map(torch.equal, tensors_of(attention.kv), before))


@pytest.mark.parametrize("names", [("reference", "native"), ("native", "cpu")])
def test_pages_of_all_groups_travel_between_layouts(names: tuple[str, str]) -> None:
    first, second = (backend(name, BOTH, 6).kv for name in names)
    assert isinstance(first, GroupedKV)
    for tensor in tensors_of(first):
        tensor.copy_(torch.randn(tensor.shape))
    pages = export(first, [4, 1])
    import_(second, [2, 3], pages)
    assert torch.equal(export(second, [2, 3]), pages)
    assert not export(second, [1, 4]).any()


def test_values_are_normed_without_a_weight(rng: np.random.Generator) -> None:
    requests = PagedRequests([[0] * 9], 16, rng)
    attention, batch = backend("reference", SMALL, requests.num_pages), requests.batch([(0, 9)])
    qkv = drawn(SMALL, 9)
    want = torch.nn.functional.rms_norm(qkv[:, 6 * 32 :].float().view(9, 2, 32), (32,), eps=1e-6)
    attention.forward(qkv, layer(SMALL, 0), attention.plan(batch))
    got = export(attention.kv, requests.pages[0].tolist())[0, 1, 0, :9].float()
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
