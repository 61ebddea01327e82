"""Turn a plan into a `ForwardBatch`: whole-array arithmetic, no loop over tokens or rows.

The host's data is gathered in arrays by name, sent to the device, and completed there from the tables.
"""

from __future__ import annotations

import numpy as np

from tokenmill.core.plan import StepPlan
from tokenmill.engine.runner.prompt_reports import OutputTokens
from tokenmill.engine.runner.row_tables import RowTables
from tokenmill.engine.runner.samples import Samples
from tokenmill.model.attention.batch import BatchPages, DeviceLens, ForwardBatch
from tokenmill.model.attention.row_extension import Arrays, Sent


def step_arrays(plan: StepPlan, samples: Samples, wanted: OutputTokens, first: int = 0) -> Arrays:
    """Build the arrays of a step's batch.

    Args:
        first: the requests before this one run elsewhere; each of their tokens has an output.
    """
    start = samples.query_starts[first]
    query_starts = samples.query_starts[first:] - start
    rows, num_computed, num_scheduled = plan.rows[first:], plan.num_computed[first:], plan.num_scheduled[first:]
    # Token t of request b stands at position num_computed[b] + (t - query_starts[b]).
    positions = np.arange(query_starts[-1], dtype=np.int64)
    positions += np.repeat(num_computed - query_starts[:-1], num_scheduled)
    return {
        "rows": rows.astype(np.int64),
        "row_of_token": np.repeat(rows, num_scheduled).astype(np.int64),
        "positions": positions,
        "context_lens": num_computed + num_scheduled,
        "query_starts": query_starts,
        "output_indices": wanted.indices[start:] - start,
        "samples": wanted.samples[start:] - start,
    }


def build_batch(arrays: Arrays, sent: Sent, tables: RowTables) -> ForwardBatch:
    """Gather the step's tokens and pages from the tables (which already hold the plan's differences).

    Args:
        arrays, sent: `step_arrays`, and maybe more, on the host and on the device.
    """
    xp, page_size = tables.arrays, tables.page_size
    positions, row_of_token, context_lens = sent["positions"], sent["row_of_token"], sent["context_lens"]
    numbers, offsets = positions // page_size, positions % page_size
    page_of_token = xp.astype(tables.pages[row_of_token, numbers], "int64")
    num_pages = -(-int(arrays["context_lens"].max()) // page_size)
    page_table = tables.pages[sent["rows"], :num_pages]
    page_table *= tables.page_starts[:num_pages] < context_lens[:, None]
    windows = None
    if tables.window_pages is not None:
        window_page = xp.astype(tables.window_pages[row_of_token, numbers], "int64")
        own = tables.window_pages[sent["rows"], :num_pages]
        own *= page_table != 0
        # What no token of the step can reach is stale: another request may have it.
        begins = context_lens - (sent["query_starts"][1:] - sent["query_starts"][:-1]) - tables.window + 1
        own *= tables.page_starts[1 : num_pages + 1] > begins[:, None]
        windows = BatchPages(window_page * page_size + offsets, own)
    query_starts = arrays["query_starts"]
    return ForwardBatch(
        token_ids=xp.astype(tables.tokens[row_of_token, positions], "int64"),
        positions=positions,
        slots=page_of_token * page_size + offsets,
        page_table=page_table,
        query_lens=query_starts[1:] - query_starts[:-1],
        context_lens=arrays["context_lens"],
        query_starts=query_starts,
        output_indices=sent["output_indices"],
        lens=DeviceLens(context_lens, sent["query_starts"]),
        windows=windows,
    )
