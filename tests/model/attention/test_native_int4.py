"""KV of 4 bits against its slow model and the reference: keys and values rotated, a code and a scale for each."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from tests.canonical import export, import_, tensors_of
from tests.model.attention.kv_codes import decoded, encoded, unpacked
from tests.model.attention.test_native import Case, angles, best_isa, run
from tests.model.kernels.native import every_isa
from tests.paging import attention_layers, unrotated
from tokenmill.model.attention.backends.reference import ReferenceAttention
from tokenmill.model.attention.packed_kv import PackedKV
from tokenmill.model.attention.protocol import AttentionSpec
from tokenmill.model.attention.tensor_kv import HeadMajorKV


@every_isa
@pytest.mark.parametrize("page_size", [4, 16])
def test_int4_is_stored_by_the_kernel_as_its_slow_model_does(
    isa: str, page_size: int, rng: np.random.Generator
) -> None:
    head_dim = int(rng.choice([16, 48, 64, 80, 128]))
    case = Case(AttentionSpec(1, 2, 2, head_dim), page_size, None, [70])
    requests = case.requests(rng)
    native = case.native(requests.num_pages, isa, 1, "int4")
    batch, qkv = requests.batch([(0, 70)]), case.qkv(70)
    qkv[3, 2 * head_dim :] = 0
    qkv[5, 2 * head_dim + 1] = 100.0  # one channel far above the others
    run(native, batch, qkv, unrotated(70, head_dim, torch.bfloat16))
    keys, values, *scales = (tensor[0, requests.pages[0]] for tensor in tensors_of(native.kv))
    stored = unpacked(keys[None], values[None])
    given = qkv.view(70, 3, 2, head_dim)[:, 1:].float()
    for part, (codes, steps) in enumerate(zip(stored, scales, strict=True)):
        want, wanted_steps = encoded(given[:, part])
        found = codes[0].transpose(1, 2).flatten(0, 1)[:70]
        found_steps = steps.transpose(1, 2).flatten(0, 1)[:70]
        # Sums have another order: of two scales that lose the same either may win, and a number on an edge may fall to
        # the other side.
        losses = [
            (given[:, part] - decoded(codes, steps)).square().sum(-1)
            for codes, steps in ((found, found_steps), (want, wanted_steps))
        ]
        assert (losses[0] <= 1.01 * losses[1]).all()
        is_other = (found_steps - wanted_steps).abs() > 0.02 * wanted_steps
        assert is_other.float().mean() < 0.05
        is_nonzero = wanted_steps > 0
        assert (found != want)[is_nonzero & ~is_other].float().mean() < 0.01
        assert (found_steps[~is_nonzero] == 0).all() and (~is_nonzero).sum() == 2


@every_isa
def test_int4_is_the_attention_over_what_its_pages_mean(isa: str, rng: np.random.Generator) -> None:
    case = dataclasses.replace(Case.draw(rng), page_size=int(rng.choice([4, 16, 32])))
    requests = case.requests(rng)
    batch = requests.batch([(request, length) for request, length in enumerate(case.lengths)])
    qkv, rotary = case.qkv(len(batch.token_ids)), angles(1500, case.spec.head_dim)
    native = case.native(requests.num_pages, isa, int(rng.integers(1, 4)), "int4")
    ends = torch.from_numpy(batch.query_starts[1:] - 1).long()
    got = run(native, batch, qkv, rotary, None, case.window)[:, ends]
    kv = HeadMajorKV(case.spec, requests.num_pages, case.page_size, "bfloat16", "cpu")
    import_(kv, range(requests.num_pages), export(native.kv, range(requests.num_pages)))
    requests.computed = [length - 1 for length in case.lengths]
    last = requests.batch([(request, 1) for request in range(len(case.lengths))])
    queries = qkv[ends, : case.spec.num_heads * case.spec.head_dim]
    plain = ReferenceAttention(case.spec, kv)
    plan, layers = plain.plan(last), attention_layers(case.spec, rotary, None, case.window)
    reading = [msgspec.structs.replace(layer, reads_only=True) for layer in layers]
    want = torch.stack([plain.forward(queries.clone(), layer, plan) for layer in reading])
    # Queries are rounded once more behind their rotation, and so are the numbers of the export.
    torch.testing.assert_close(got, want, rtol=0.03, atol=0.03, msg=lambda text: f"{text}\n{case}")


@best_isa
def test_a_mixed_cache_has_keys_of_int8_and_values_of_int4(isa: str, rng: np.random.Generator) -> None:
    case = dataclasses.replace(Case.draw(rng), lengths=[40])
    requests = case.requests(rng)
    qkv, batch = case.qkv(40), requests.batch([(0, 40)])
    stored = []
    for dtype in ("int8", "int8-int4", "int4"):
        native = case.native(requests.num_pages, isa, 1, dtype)
        run(native, batch, qkv, angles(1500, case.spec.head_dim), None, case.window)
        stored.append(tensors_of(native.kv))
    int8, mixed, int4 = stored
    assert all(torch.equal(int8[part], mixed[part]) for part in (0, 2)), case
    assert all(torch.equal(int4[part], mixed[part]) for part in (1, 3)), case


@best_isa
def test_int4_stays_near(isa: str, rng: np.random.Generator) -> None:
    case = Case(AttentionSpec(1, 8, 4, 128), 16, None, [300])
    requests = case.requests(rng)
    batch, qkv, rotary = requests.batch([(0, 300)]), case.qkv(300), angles(300, 128)
    exact, *rounded = (
        run(case.native(requests.num_pages, isa, 1, dtype), batch, qkv, rotary)[0].float()
        for dtype in ("bfloat16", "int4", "int8-int4")
    )
    errors = [float((exact - one).norm() / exact.norm()) for one in rounded]
    assert errors[1] < errors[0] < 0.2
    assert errors[1] < 0.12


def test_int4_takes_little_more_than_a_quarter() -> None:
    spec = AttentionSpec(2, 4, 2, 128)
    full, quarter = (PackedKV(spec, 5, 16, dtype, "cpu").num_bytes for dtype in ("bfloat16", "int4"))
    assert quarter == full // 4 + 2 * 2 * 5 * 16 * 2 * 4
