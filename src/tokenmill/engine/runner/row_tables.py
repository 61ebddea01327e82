"""The page table and the token table: per-row state on the device, changed only by the differences a plan brings.

The token table closes the loop of overlap scheduling (as in Mini-SGLang): a step writes its sampled tokens there, and
the next step reads its inputs from there, whether or not the host knows them yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenmill.core.plan import StepPlan
from tokenmill.engine.runner.samples import Samples
from tokenmill.model.attention.row_extension import Arrays, Sent
from tokenmill.platform.arrays import ArrayLibrary

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array


class RowTables:
    """Page and token tables of the rows of running requests.

    Attributes:
        pages: [num_rows, max_pages] int32, page ids; entries past a request's pages are stale and never read.
        tokens: [num_rows, max_pages * page_size] int32, prompt and output ids.
        window_pages: as `pages`, for the window group; entries behind a window are stale too. None: absent.
        window: most tokens that its layers attend to.
        page_starts: [max_pages + 1] int32, the position at which each page begins; the end of the last one.
        arrays: the library of all these.
    """

    def __init__(
        self,
        num_rows: int,
        max_len: int,
        page_size: int,
        arrays: ArrayLibrary,
        window: int = 0,
    ) -> None:
        max_pages = -(-max_len // page_size)
        self.arrays = arrays
        self.window = window
        self.window_pages = arrays.zeros((num_rows, max_pages), "int32") if window else None
        self.page_size = page_size
        self.page_starts = arrays.arange(max_pages + 1, "int32") * page_size
        self.pages = arrays.zeros((num_rows, max_pages), "int32")
        self.tokens = arrays.zeros((num_rows, max_pages * page_size), "int32")

    def apply(self, plan: StepPlan, sent: Sent) -> None:
        """Enter new rows, drafts and new pages.

        Args:
            sent: `table_arrays` of the plan, and maybe more, on the device.
        """
        start = 0
        for new in plan.new_rows:
            end = start + len(new.token_ids)
            self.tokens[new.row, : end - start] = sent["new_tokens"][start:end]
            start = end
        if plan.draft_ids is not None:
            self.write_drafts(sent)
        if len(plan.page_ids):
            self.pages[sent["page_rows"], sent["page_numbers"]] = sent["page_ids"]
        if plan.window_pages is not None:
            assert self.window_pages is not None, "window pages without a window group"
            self.window_pages[sent["window_rows"], sent["window_numbers"]] = sent["window_ids"]

    def write_drafts(self, sent: Sent) -> None:
        """Enter the draft tokens of a step that has any."""
        self.tokens[sent["draft_rows"], sent["draft_positions"]] = sent["draft_ids"]

    def write_tokens(self, rows: Array, positions: Array, token_ids: Array) -> None:
        """Enter sampled tokens; all [S] int64, on the device. Tokens behind a wrong draft are written anew later.

        Token 0 stands in for a missing (negative) one: a step that is already launched runs with it, in vain.
        """
        self.tokens[rows, positions] = self.arrays.astype(self.arrays.at_least(token_ids, 0), "int32")


def table_arrays(plan: StepPlan, samples: Samples) -> Arrays:
    """Return a plan's differences as arrays; new rows' tokens one after the other."""
    arrays: Arrays = {}
    if plan.new_rows:
        arrays["new_tokens"] = np.concatenate([new.token_ids for new in plan.new_rows])
    if plan.draft_ids is not None and samples.drafts is not None:
        is_drafted = samples.drafts >= 0
        arrays["draft_rows"], arrays["draft_positions"] = samples.rows[is_drafted], samples.positions[is_drafted]
        arrays["draft_ids"] = plan.draft_ids
    if len(plan.page_ids):
        arrays["page_rows"] = plan.page_rows.astype(np.int64)
        arrays["page_numbers"] = plan.page_numbers.astype(np.int64)
        arrays["page_ids"] = plan.page_ids
    if (entries := plan.window_pages) is not None:
        arrays["window_rows"] = entries.rows.astype(np.int64)
        arrays["window_numbers"] = entries.numbers.astype(np.int64)
        arrays["window_ids"] = entries.ids
    return arrays
