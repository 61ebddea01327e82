"""From a plan to a `ForwardBatch`: whole-array arithmetic, no loop over tokens or rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.attention.batch import ForwardBatch
from tokenmill.runner.row_tables import RowTables
from tokenmill.scheduler.plan import StepPlan


def build_batch(plan: StepPlan, tables: RowTables, output_indices: npt.NDArray[np.int64]) -> ForwardBatch:
    """Gather the step's tokens, positions and pages from the tables (which already hold the plan's differences).

    Args:
        output_indices: [S], the tokens that the model gives an output for.
    """
    device = tables.tokens.device
    ends = plan.num_computed + plan.num_scheduled
    query_starts = np.zeros(len(plan.rows) + 1, dtype=np.int32)
    np.cumsum(plan.num_scheduled, out=query_starts[1:])

    # Token t of request b stands at position num_computed[b] + (t - query_starts[b]).
    host_positions = np.arange(query_starts[-1], dtype=np.int64)
    host_positions += np.repeat(plan.num_computed - query_starts[:-1], plan.num_scheduled)
    positions = torch.from_numpy(host_positions).to(device)
    row_of_token = torch.from_numpy(np.repeat(plan.rows, plan.num_scheduled).astype(np.int64)).to(device)

    page_of_token = tables.pages[row_of_token, positions // tables.page_size].long()
    num_pages = -(-int(ends.max()) // tables.page_size)
    rows = torch.from_numpy(plan.rows.astype(np.int64)).to(device)
    held = torch.from_numpy(-(-ends // tables.page_size)).to(device)
    page_numbers = torch.arange(num_pages, dtype=torch.int32, device=device)
    page_table = tables.pages[rows, :num_pages]
    page_table = page_table.masked_fill_(page_numbers >= held[:, None], 0)
    return ForwardBatch(
        token_ids=tables.tokens[row_of_token, positions].long(),
        positions=positions,
        slots=page_of_token * tables.page_size + positions % tables.page_size,
        page_table=page_table,
        query_lens=plan.num_scheduled,
        context_lens=ends,
        query_starts=query_starts,
        output_indices=torch.from_numpy(output_indices).to(device),
    )
