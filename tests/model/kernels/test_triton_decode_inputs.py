"""The inputs of a decode step, against what numpy makes of the tables."""

from __future__ import annotations

import numpy as np
import torch

from tests.model.kernels.gpu import DEVICE
from tokenmill.model.kernels.triton import decode_inputs


def test_pages_of_windows_are_those_that_the_tokens_reach(rng: np.random.Generator) -> None:
    for num_pages in (1, 3, 1030):
        page_size, num_rows, n = int(rng.choice([1, 4, 16])), int(rng.integers(1, 9)), int(rng.integers(1, 12))
        pages = rng.integers(1, 2**31, (num_rows, num_pages), dtype=np.int64).astype(np.int32)
        draws = rng.integers(0, 2**62, (n, 9))
        rows = draws[:, 0] = rng.integers(0, num_rows, n)
        ends = draws[:, 1] = rng.integers(1, num_pages * page_size + 1, n)
        reach = int(rng.integers(1, num_pages * page_size + 2))
        sent = torch.from_numpy(draws).to(DEVICE)
        table = torch.from_numpy(pages).to(DEVICE)
        found = decode_inputs.window_inputs(sent[:, 0], sent[:, 1], table, page_size, reach)
        slots, page_table = (part.cpu().numpy() for part in found)
        want = np.zeros((n, num_pages), np.int32)
        for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
            # The token at end - 1 attends to the `reach` positions up to its own.
            numbers = sorted({position // page_size for position in range(max(0, end - reach), end)})
            want[index, numbers] = pages[row, numbers]
        assert (page_table == want).all()
        own = pages[rows, (ends - 1) // page_size].astype(np.int64)
        assert (slots == own * page_size + (ends - 1) % page_size).all()


def test_inputs_are_what_the_tables_say(rng: np.random.Generator) -> None:
    for num_pages in (1, 3, 1030):
        page_size, num_rows, n = int(rng.choice([1, 4, 16])), int(rng.integers(1, 9)), int(rng.integers(1, 12))
        pages = rng.integers(1, 2**31, (num_rows, num_pages), dtype=np.int64).astype(np.int32)
        tokens = rng.integers(0, 2**31, (num_rows, num_pages * page_size), dtype=np.int64).astype(np.int32)
        # Rows and ends as they lie in packed draws: two fields of several; rows may come twice, as the padding does.
        draws = rng.integers(0, 2**62, (n, 9))
        draws[:, 0] = rng.integers(0, num_rows, n)
        draws[:, 1] = rng.integers(1, num_pages * page_size + 1, n)
        draws[0, 1] = num_pages * page_size
        sent = torch.from_numpy(draws).to(DEVICE)
        tables = torch.from_numpy(pages).to(DEVICE), torch.from_numpy(tokens).to(DEVICE)
        found = decode_inputs.decode_inputs(sent[:, 0], sent[:, 1], *tables)
        (token_ids, positions, slots), lens, page_table = (part.cpu().numpy() for part in found)
        rows, ends = draws[:, 0], draws[:, 1]
        assert (token_ids == tokens[rows, ends - 1]).all()
        assert (positions == ends - 1).all()
        # A slot may be more than 32 bits hold.
        page = pages[rows, (ends - 1) // page_size].astype(np.int64)
        assert (slots == page * page_size + (ends - 1) % page_size).all()
        assert (lens == ends).all()
        is_used = np.arange(num_pages) * page_size < ends[:, None]
        assert (page_table == np.where(is_used, pages[rows], 0)).all()
        assert [part.dtype for part in (token_ids, positions, slots)] == [np.int64] * 3
        assert lens.dtype == page_table.dtype == np.int32
