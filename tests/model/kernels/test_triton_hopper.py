"""Prompts' attention for Hopper: its own source run by threads here, the compiled kernel where there is such a GPU."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE
from tests.model.kernels.test_triton_attention import Case

hopper = pytest.importorskip("tokenmill.model.kernels.triton.hopper", reason="this triton has no Gluon for Hopper")

CAN_RUN = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not CAN_RUN, reason="a kernel for capability 9.0")


@pytest.fixture(autouse=True)
def threads(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(int(rng.integers(1 << 30)))
    if not CAN_RUN:
        from tests.model.kernels.gluon_threads import Launcher

        monkeypatch.setattr(hopper, "_attend_prompts", Launcher(hopper, "_attend_prompts"))


def halved(*shape: Any, **options: Any) -> Case:
    """A case in half precision, its expectation too; the backend is not chosen where windows give pages up."""
    case = Case(*shape, **options, keeps_pages=True)
    half = torch.bfloat16
    case.kv = hopper.PagedKV(
        *(case.kv.keys.to(half), case.kv.values.to(half)),
        *(case.kv.page_table, case.kv.context_lens, case.kv.query_starts),
    )
    case.q = case.q.to(half)
    case.sequences = [(k.to(half), v.to(half)) for k, v in case.sequences]
    return case


def output_of(case: Case) -> torch.Tensor:
    return torch.full(case.q.shape, torch.nan, dtype=case.q.dtype, device=DEVICE)


def check(case: Case, num_programs: int) -> None:
    want, others = case.expected(), random.randrange(4)
    # Tokens of other requests are in front.
    case.q = torch.cat([torch.full_like(case.q[:1].expand(others, -1, -1), torch.nan), case.q])
    case.kv = msgspec.structs.replace(case.kv, query_starts=case.kv.query_starts + others)
    got = output_of(case)
    hopper.attend_prompts(case.q, case.kv, got, case.scores, num_programs)
    assert got[:others].isnan().all()
    torch.testing.assert_close(got[others:].float().cpu(), want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 16), (128, 256), (256, 64)])
def test_prompts_and_chunks_equal_attention_written_out(
    head_dim: int, page_size: int, rng: np.random.Generator
) -> None:
    lens = [int(count) for count in rng.choice([1, 2, 30, 70, 150], int(rng.integers(1, 4)))]
    case = halved(rng, page_size, lens, 300, group=int(rng.choice([1, 2, 4, 7])), head_dim=head_dim)
    check(case, int(rng.choice([1, 3, 1000])))


def test_keys_before_a_long_prefix_go_around_the_stages(rng: np.random.Generator) -> None:
    contexts = [int(rng.integers(600, 1100)), 128, int(rng.integers(257, 400))]
    case = halved(rng, 16, [40, 128, 1], 300, contexts, 2, head_dim=128)
    check(case, int(rng.choice([2, 5])))


def test_a_token_has_the_same_bits_in_every_chunk(rng: np.random.Generator) -> None:
    case = halved(rng, 16, [90], 300, [int(rng.integers(90, 500))], 2, head_dim=128)
    whole, cut = output_of(case), int(rng.integers(1, 90))
    hopper.attend_prompts(case.q, case.kv, whole, case.scores, 4)
    starts = torch.tensor([0, 90 - cut], dtype=torch.int32, device=DEVICE)
    kv = hopper.PagedKV(case.kv.keys, case.kv.values, case.kv.page_table, case.kv.context_lens, starts)
    got = torch.full_like(whole[cut:], torch.nan)
    hopper.attend_prompts(case.q[cut:], kv, got, case.scores, 4)
    if CAN_RUN:
        assert torch.equal(got, whole[cut:])
    else:
        torch.testing.assert_close(got, whole[cut:], rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        (((8, 9), 128, 2, 16), "capability"),
        (((10, 0), 128, 2, 16), "capability"),
        (((9, 0), 64, 2, 16), "heads"),
        (((9, 0), 128, 71, 16), "heads"),
        (((9, 0), 128, 2, 8), "pages"),
        (((9, 0), 128, 2, 48), "pages"),
    ],
)
def test_other_shapes_have_an_obstacle(shape: tuple[tuple[int, int], int, int, int], word: str) -> None:
    assert word in str(hopper.shape_obstacle(*shape))


def test_served_shapes_have_none() -> None:
    assert hopper.shape_obstacle((9, 0), 128, 2, 16) is None
    assert hopper.shape_obstacle((9, 0), 256, 7, 256) is None
