"""Paged attention against attention written out per token, over memory whose unused slots are poisoned."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.gpu import DEVICE, HALF, same
from tokenmill.kernels.triton import attention
from tokenmill.kernels.triton.attention import PagedKV, attend_decodes, attend_prompts

POISONS = (float("nan"), float("inf"), float("-inf"))


class Case:
    """Requests in the middle of their sequences, their keys and values scattered over pages."""

    def __init__(self, rng: np.random.Generator, page_size: int, query_lens: list[int], longest: int) -> None:
        self.kv_heads, self.group = int(rng.integers(1, 3)), int(rng.choice([1, 2, 3, 7]))
        self.head_dim = int(rng.choice([8, 16, 20]))
        self.scale = self.head_dim**-0.5
        self.window = None if rng.random() < 0.5 else int(rng.integers(1, longest))
        self.query_lens = query_lens
        self.contexts = [count + int(rng.integers(0, longest)) for count in query_lens]
        held = [-(-context // page_size) for context in self.contexts]
        ids = 1 + rng.permutation(sum(held))
        table = np.zeros((len(held), max(held) + 1), dtype=np.int32)
        shape = (sum(held) + 1, page_size, self.kv_heads, self.head_dim)
        keys, values = (torch.full(shape, float(rng.choice(POISONS))) for _ in "kv")
        self.sequences = []
        for row, (count, context) in enumerate(zip(held, self.contexts, strict=True)):
            table[row, :count], ids = ids[:count], ids[count:]
            k, v = torch.randn(2, context, self.kv_heads, self.head_dim)
            positions = np.arange(context)
            for memory, new in ((keys, k), (values, v)):
                memory[table[row, positions // page_size], positions % page_size] = new
            self.sequences.append((k, v))
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        self.kv = PagedKV(
            keys.to(DEVICE),
            values.to(DEVICE),
            torch.from_numpy(table).to(DEVICE),
            torch.tensor(self.contexts, dtype=torch.int32, device=DEVICE),
            torch.from_numpy(starts).to(DEVICE),
        )
        # Every second row of a wider tensor: tokens have a stride of their own.
        self.q = torch.randn(int(starts[-1]), 2, self.kv_heads * self.group, self.head_dim, device=DEVICE)[:, 0]

    def expected(self) -> torch.Tensor:
        rows = []
        for request, count in enumerate(self.query_lens):
            start = sum(self.query_lens[:request])
            for index in range(count):
                position = self.contexts[request] - count + index
                first = 0 if self.window is None else max(0, position - self.window + 1)
                k, v = (part[first : position + 1].double() for part in self.sequences[request])
                q = self.q[start + index].cpu().double().unflatten(0, (self.kv_heads, self.group))
                weights = (torch.einsum("hgd,nhd->hgn", q, k) * self.scale).softmax(-1)
                rows.append(torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1))
        return torch.stack(rows).float()


def output_of(case: Case) -> torch.Tensor:
    return torch.full(case.q.shape, torch.nan, device=DEVICE)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 256])
def test_prompts_and_chunks_equal_attention_written_out(page_size: int, rng: np.random.Generator) -> None:
    lens = [int(count) for count in rng.choice([1, 2, 5, 30, 70], int(rng.integers(1, 4)))]
    case = Case(rng, page_size, lens, 100)
    got = output_of(case)
    attend_prompts(case.q, case.kv, got, case.scale, case.window)
    torch.testing.assert_close(got.cpu(), case.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_decodes_equal_attention_written_out(page_size: int, splits: int, rng: np.random.Generator) -> None:
    case = Case(rng, page_size, [1] * int(rng.integers(1, 4)), int(rng.choice([5, 300])))
    got = output_of(case)
    attend_decodes(case.q, case.kv, got, case.scale, case.window, splits)
    torch.testing.assert_close(got.cpu(), case.expected(), rtol=1e-4, atol=1e-4)


def test_prompts_behind_decodes_leave_the_decodes_alone(rng: np.random.Generator) -> None:
    case = Case(rng, 4, [1, 1, 6, 20], 40)
    kv = case.kv
    got, whole = output_of(case), case.expected()
    rest = PagedKV(kv.keys, kv.values, kv.page_table[2:], kv.context_lens[2:], kv.query_starts[2:])
    attend_prompts(case.q, rest, got, case.scale, case.window)
    assert got[:2].isnan().all()
    torch.testing.assert_close(got[2:].cpu(), whole[2:], rtol=1e-4, atol=1e-4)


def test_without_splits_a_token_is_the_same_in_every_chunk_and_company(
    rng: np.random.Generator,
) -> None:
    """As the last token of a long chunk, of a short one and alone among others."""
    case = Case(rng, 4, [40, 3], 100)
    together = output_of(case)
    attend_prompts(case.q, case.kv, together, case.scale, case.window)
    kv = case.kv
    for count in (1, 2, 17):
        starts = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        alone = PagedKV(kv.keys, kv.values, kv.page_table[:1], kv.context_lens[:1], starts)
        q = case.q[40 - count : 40]
        got = torch.empty(q.shape, device=DEVICE)
        attend_prompts(q, alone, got, case.scale, case.window)
        assert same(got, together[40 - count : 40])


def test_half_precision_stays_near(rng: np.random.Generator) -> None:
    case = Case(rng, 16, [1, 9], 100)
    kv = case.kv
    half = PagedKV(kv.keys.to(HALF), kv.values.to(HALF), kv.page_table, kv.context_lens, kv.query_starts)
    got = torch.empty(case.q.shape, dtype=HALF, device=DEVICE)
    attend_prompts(case.q.to(HALF), half, got, case.scale, case.window)
    torch.testing.assert_close(got.float().cpu(), case.expected(), rtol=0.05, atol=0.05)


def test_tiles_are_wide_enough_for_matrix_units() -> None:
    assert attention.DECODE_ROWS >= 16
    assert attention.TILE_KEYS % 16 == 0
