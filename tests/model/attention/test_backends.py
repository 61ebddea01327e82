"""The cpu backend against the reference, and both against attention written out for one token."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.paging import Chunks, PagedRequests, attention_layers, make_attention, unrotated
from tokenmill.model.attention.backends import cpu
from tokenmill.model.attention.protocol import AttentionSpec
from tokenmill.model.attention.tensor_kv import HeadMajorKV

POISONS = (float("nan"), float("inf"), float("-inf"))


@dataclasses.dataclass
class Case:
    """A random shape with requests in the middle of their sequences."""

    spec: AttentionSpec
    page_size: int
    dtype: torch.dtype
    window: int | None
    lengths: list[int]
    chunks: Chunks

    @property
    def computed(self) -> list[int]:
        counts = dict(self.chunks)
        return [length - counts[request] for request, length in enumerate(self.lengths)]


def random_case(rng: np.random.Generator, page_size: int, dtype: torch.dtype = torch.float32) -> Case:
    kv_heads, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 4, 8]))
    head_dim = int(rng.choice([2, 6, 8, 10, 24, 32]))
    spec = AttentionSpec(2, kv_heads * group, kv_heads, head_dim)
    lengths = [int(length) for length in rng.choice([1, 2, 31, 33, 60, 150, 300, 700], int(rng.integers(1, 9)))]
    lengths = [max(1, length + int(rng.integers(-1, 2))) for length in lengths]
    chunks = [
        (request, 1 if rng.random() < 0.6 else int(rng.integers(1, length + 1)))
        for request, length in enumerate(lengths)
    ]
    rng.shuffle(chunks)
    window = None if rng.random() < 0.5 else int(rng.integers(1, 200))
    return Case(spec, page_size, dtype, window, lengths, chunks)


def fill(pool: HeadMajorKV, poison: float, requests: PagedRequests, case: Case) -> None:
    """Random keys and values in the slots of computed tokens, poison everywhere else."""
    for memory in (pool.keys, pool.values):
        memory.fill_(poison)
    for request, computed in enumerate(case.computed):
        positions = np.arange(computed)
        slots = requests.pages[request][positions // case.page_size] * case.page_size + positions % case.page_size
        rows = pool.slot_rows(torch.from_numpy(slots))
        for layer in range(case.spec.num_layers):
            shape = (computed, case.spec.num_kv_heads, case.spec.head_dim)
            k, v = torch.randn(shape).to(case.dtype), torch.randn(shape).to(case.dtype)
            pool.write(layer, rows, k, v)


def run_both(case: Case, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the reference and of cpu on the same memory, whose unused slots are poisoned."""
    requests = PagedRequests([[0] * length for length in case.lengths], case.page_size, rng)
    requests.computed = case.computed
    made = (case.spec, requests.num_pages, case.page_size, case.dtype)
    reference, batched = (make_attention(name, *made) for name in ("reference", "cpu"))
    fill(reference.kv, float(rng.choice(POISONS)), requests, case)
    batched.kv.keys.copy_(reference.kv.keys)
    batched.kv.values.copy_(reference.kv.values)

    batch = requests.batch(case.chunks)
    num_tokens = len(batch.token_ids)
    heads = (case.spec.num_heads, case.spec.num_kv_heads, case.spec.num_kv_heads)
    qkv = torch.randn(num_tokens, sum(heads) * case.spec.head_dim).to(case.dtype)
    outputs = []
    sinks = None if rng.random() < 0.5 else torch.randn(case.spec.num_heads).to(case.dtype)
    for backend in (reference, batched):
        plan = backend.plan(batch)
        layers = attention_layers(case.spec, None, None, case.window, sinks)
        outputs.append(torch.stack([backend.forward(qkv.clone(), layer, plan) for layer in layers]))
    return outputs[0], outputs[1]


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64])
def test_cpu_equals_reference_over_poisoned_memory(page_size: int, rng: np.random.Generator) -> None:
    for _ in range(8):
        case = random_case(rng, page_size)
        want, got = run_both(case, rng)
        assert want.isfinite().all(), case
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda text, case=case: f"{text}\n{case}")


def test_small_buckets_and_small_query_chunks_change_nothing(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "BUCKET_BYTES", int(rng.integers(1, 20_000)))
    monkeypatch.setattr(cpu, "MAX_SCORES", int(rng.integers(1, 20_000)))
    for _ in range(8):
        case = random_case(rng, 4)
        want, got = run_both(case, rng)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda text, case=case: f"{text}\n{case}")


def test_cpu_stays_near_the_reference_in_bfloat16(rng: np.random.Generator) -> None:
    for _ in range(6):
        case = random_case(rng, 16, torch.bfloat16)
        want, got = run_both(case, rng)
        assert got.dtype == torch.bfloat16
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.05, msg=lambda text, case=case: f"{text}\n{case}")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_a_token_attends_to_its_own_past_only(backend: str, window: int | None, rng: np.random.Generator) -> None:
    """Written out: softmax(q k / sqrt(d)) v over the visible positions, token by token."""
    spec = AttentionSpec(1, 4, 2, 6)
    length = 21
    requests = PagedRequests([[0] * length], 4, rng)
    attention = make_attention(backend, spec, requests.num_pages, 4, torch.float32)
    batch = requests.batch([(0, length)])
    qkv = torch.randn(length, 8, 6)
    q, k, v = qkv.split((4, 2, 2), 1)
    (layer,) = attention_layers(spec, None, None, window)
    got = attention.forward(qkv.flatten(1).clone(), layer, attention.plan(batch)).view(length, 4, 6)
    for token in range(length):
        first = 0 if window is None else max(0, token - window + 1)
        for head in range(4):
            weights = torch.softmax(k[first : token + 1, head // 2] @ q[token, head] * layer.scale, 0)
            torch.testing.assert_close(got[token, head], weights @ v[first : token + 1, head // 2])


def test_a_bucket_holds_no_more_than_its_share_of_memory(rng: np.random.Generator) -> None:
    spec = AttentionSpec(1, 8, 8, 128)
    requests = PagedRequests([[0] * 200] * 100, 16, rng)
    pool = HeadMajorKV(spec, requests.num_pages, 16, "bfloat16", "cpu")
    requests.computed = [199] * 100
    buckets = cpu.decode_buckets(requests.batch([(request, 1) for request in range(100)]), pool, None)
    # 200 tokens are padded to 256, which take 512 KiB.
    assert [len(bucket.tokens) for bucket in buckets] == [4] * 25
    assert sorted(torch.cat([bucket.tokens for bucket in buckets]).tolist()) == list(range(100))


def test_padding_wastes_less_than_half_and_long_contexts_a_quarter() -> None:
    lengths = np.arange(1, 5000)
    padded = cpu.padded_lengths(lengths)
    assert (padded >= lengths).all()
    assert (padded[lengths >= 32] < 1.5 * lengths[lengths >= 32]).all()
    assert (padded[lengths > 512] < 1.26 * lengths[lengths > 512]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_is_bit_identical_alone_and_in_company(dtype: torch.dtype, rng: np.random.Generator) -> None:
    lengths = [int(length) for length in rng.integers(2, 400, 6)]
    requests = PagedRequests([[0] * length for length in lengths], 16, rng)
    spec = AttentionSpec(1, 4, 2, 16)
    attention = make_attention("cpu", spec, requests.num_pages, 16, dtype)
    attention.kv.keys.normal_()
    attention.kv.values.normal_()
    requests.computed = [length - 1 for length in lengths]
    qkv, (layer,) = torch.randn(6, 8 * 16).to(dtype), attention_layers(spec, unrotated(max(lengths), 16, dtype))
    batch = requests.batch([(request, 1) for request in range(6)])
    together = attention.forward(qkv.clone(), layer, attention.plan(batch))
    for request in range(6):
        requests.computed = [length - 1 for length in lengths]
        alone = requests.batch([(request, 1)])
        row = qkv[request : request + 1].clone()
        single = attention.forward(row, layer, attention.plan(alone))
        assert torch.equal(single[0], together[request]), f"lengths {lengths}, request {request}"
