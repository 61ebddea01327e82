"""torch's flash attention as it is found and tried: what its versions offer, what it must get right to be taken."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.attention.test_paged import stand_in_for_torch
from tests.paging import name_of
from tokenmill.model.attention.backends.flash import find_flash, flash_obstacle
from tokenmill.model.attention.protocol import AttentionSpec


def obstacle(attention: Any, page_size: int = 16, dtype: torch.dtype = torch.float16) -> str | None:
    return flash_obstacle(AttentionSpec(1, 4, 2, 16), page_size, name_of(dtype), "cpu", attention)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_attends_rightly_is_taken(page_size: int, dtype: torch.dtype) -> None:
    before = torch.random.get_rng_state()
    assert obstacle(stand_in_for_torch, page_size, dtype) is None
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_comes_out_wrong_is_refused(rng: np.random.Generator) -> None:
    row = int(rng.integers(9))

    def leaves_a_row(out: torch.Tensor, *given: Any, **options: Any) -> None:
        whole = torch.empty_like(out)
        stand_in_for_torch(whole, *given, **options)
        out[:row], out[row + 1 :] = whole[:row], whole[row + 1 :]

    def sees_no_window(out: torch.Tensor, *given: Any, **options: Any) -> None:
        stand_in_for_torch(out, *given, **{**options, "window_size": (-1, 0)})

    def takes_pages_in_order(out: torch.Tensor, *given: Any, **options: Any) -> None:
        stand_in_for_torch(out, *given, **{**options, "block_table": options["block_table"].sort(1).values})

    def starts_at_the_front(out: torch.Tensor, q: torch.Tensor, *given: Any, **options: Any) -> None:
        stand_in_for_torch(out, q.flip(0), *given, **options)

    for wrong in (leaves_a_row, sees_no_window, takes_pages_in_order, starts_at_the_front):
        assert obstacle(wrong) == "flash attention is wrong over pages of 16 tokens here", wrong.__name__


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError, NotImplementedError])
def test_what_refuses_is_quoted(error: type[Exception]) -> None:
    def refuses(*given: Any, **options: Any) -> None:
        raise error("Paged KV needs pages of 256. Or so.")

    assert obstacle(refuses) == "flash attention refuses pages of 16 tokens here: Paged KV needs pages of 256"


class TestVersionsOfTorch:
    def test_the_oldest_has_no_pages(self) -> None:
        assert find_flash(types.SimpleNamespace(varlen_attn=lambda query, key, value: None)) is None

    def test_one_that_allocates_is_copied_from(self) -> None:
        def varlen_attn(query: torch.Tensor, *, block_table: Any) -> torch.Tensor:
            return query * block_table

        found = find_flash(types.SimpleNamespace(varlen_attn=varlen_attn))
        assert found is not None
        output = torch.empty(3)
        found(output, torch.arange(3.0), block_table=2)
        assert output.tolist() == [0, 2, 4]

    def test_contexts_are_not_split_where_that_can_be_said(self) -> None:
        def varlen_attn_out(
            out: torch.Tensor, query: torch.Tensor, *, block_table: Any, num_splits: Any = None
        ) -> None:
            out.copy_(query * block_table * num_splits)

        found = find_flash(types.SimpleNamespace(varlen_attn=varlen_attn_out, varlen_attn_out=varlen_attn_out))
        assert found is not None
        output = torch.empty(3)
        found(output, torch.arange(3.0), block_table=2)
        assert output.tolist() == [0, 2, 4]
