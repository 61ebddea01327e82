"""Paged attention at the shapes that models have: heads of 128 in half precision, mixed batches, long contexts.

On a GPU this is the way through its matrix units, compared with float64; interpreted the contexts are short.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.model.kernels.gpu import DEVICE, HALF, IS_INTERPRETED
from tokenmill.model.kernels.triton.attention import PagedKV, Scores, attend_decodes, attend_prompts
from tokenmill.model.kernels.triton.splits import list_splits

HEAD_DIM, PAGE_SIZE = 128, 16
SCALE = HEAD_DIM**-0.5
# Query lengths and contexts: decodes beside a chunk of a prompt, a whole prompt.
MIXED = [(1, 40), (1, 1), (30, 75)] if IS_INTERPRETED else [(1, 8192), (1, 1), (1, 777), (512, 4097), (8192, 8192)]
DECODES = [1, 17, 270] if IS_INTERPRETED else [1, 16, 1000, 8192, 8191]


def paged(rng: np.random.Generator, lens: list[tuple[int, int]], kv_heads: int) -> tuple[PagedKV, list[torch.Tensor]]:
    """Memory of pages in random order, NaN where nothing was written; keys and values of each request beside it."""
    held = [-(-context // PAGE_SIZE) for _, context in lens]
    ids = np.split(1 + rng.permutation(sum(held)), np.cumsum(held)[:-1])
    table = np.zeros((len(lens), max(held)), dtype=np.int32)
    memory = torch.full((2, sum(held) + 1, PAGE_SIZE, kv_heads, HEAD_DIM), torch.nan, dtype=HALF)
    sequences = []
    for row, (pages, (_, context)) in enumerate(zip(ids, lens, strict=True)):
        table[row, : len(pages)] = pages
        kv = torch.randn(2, context, kv_heads, HEAD_DIM).to(HALF)
        places = np.arange(context)
        memory[:, pages[places // PAGE_SIZE], places % PAGE_SIZE] = kv
        sequences.append(kv)
    keys, values = memory.to(DEVICE)
    starts = np.concatenate([[0], np.cumsum([count for count, _ in lens])]).astype(np.int32)
    contexts = torch.tensor([context for _, context in lens], dtype=torch.int32, device=DEVICE)
    return PagedKV(
        keys, values, torch.from_numpy(table).to(DEVICE), contexts, torch.from_numpy(starts).to(DEVICE)
    ), sequences


def wanted(q: torch.Tensor, kv: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attention of a request's last tokens in float64: [n, heads, d] and [2, context, kv_heads, d] -> [n, heads, d]."""
    keys, values = kv.to(DEVICE).double().repeat_interleave(q.shape[1] // kv.shape[2], dim=2)
    outputs = []
    for start in range(0, len(q), 256):
        part = q[start : start + 256].double()
        scores = torch.einsum("nhd,chd->hnc", part, keys) * SCALE
        position = torch.arange(len(part), device=q.device)[:, None] + len(keys) - len(q) + start
        behind = position - torch.arange(len(keys), device=q.device)
        hidden = (behind < 0) | (behind >= (window or len(keys)))
        outputs.append(torch.einsum("hnc,chd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(outputs)


def compare(
    got: torch.Tensor, q: torch.Tensor, lens: list[tuple[int, int]], kvs: list[torch.Tensor], window: int | None
) -> None:
    start = 0
    for (count, context), kv in zip(lens, kvs, strict=True):
        want = wanted(q[start : start + count], kv, window)
        error = (got[start : start + count].double() - want).norm(dim=-1) / want.norm(dim=-1)
        assert error.max() < 0.02, f"{count} tokens at a context of {context}: off by {error.max():.3f}"
        start += count


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("group", [2, 5])
def test_prompts_and_chunks_among_decodes(group: int, window: int | None, rng: np.random.Generator) -> None:
    kv, sequences = paged(rng, MIXED, kv_heads=1 if IS_INTERPRETED else 8)
    q = torch.randn(sum(count for count, _ in MIXED), group * sequences[0].shape[2], HEAD_DIM).to(HALF).to(DEVICE)
    got = torch.full_like(q, torch.nan)
    attend_prompts(q, kv, got, Scores(SCALE, window))
    compare(got, q, MIXED, sequences, window)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("group", [2, 5])
def test_decodes_of_long_and_short_contexts(group: int, window: int | None, rng: np.random.Generator) -> None:
    lens = [(1, context) for context in DECODES]
    kv, sequences = paged(rng, lens, kv_heads=1 if IS_INTERPRETED else 8)
    q = torch.randn(len(lens), group * sequences[0].shape[2], HEAD_DIM).to(HALF).to(DEVICE)
    got = torch.full_like(q, torch.nan)
    heads = q.shape[1], kv.keys.shape[2], HEAD_DIM
    splits = list_splits(kv.context_lens, kv.query_starts, np.array(DECODES), heads, 132)
    attend_decodes(q, kv, got, Scores(SCALE, window), splits)
    compare(got, q, lens, sequences, window)
