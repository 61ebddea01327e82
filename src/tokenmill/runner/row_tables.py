"""The page table and the token table: per-row state on the device, changed only by the differences a plan brings.

The token table closes the loop of overlap scheduling (as in Mini-SGLang): a step writes its sampled tokens there, and
the next step reads its inputs from there, whether or not the host knows them yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenmill.platform.memory import zeros
from tokenmill.scheduler.plan import StepPlan


class RowTables:
    """Rows of running requests.

    Attributes:
        pages: [num_rows, max_pages] int32, page ids; entries past a request's pages are stale and never read.
        tokens: [num_rows, max_pages * page_size] int32, prompt and output ids.
    """

    def __init__(self, num_rows: int, max_len: int, page_size: int, device: torch.device) -> None:
        max_pages = -(-max_len // page_size)
        self.page_size = page_size
        self.pages = zeros((num_rows, max_pages), torch.int32, device)
        self.tokens = zeros((num_rows, max_pages * page_size), torch.int32, device)

    def apply(self, plan: StepPlan, sent: Mapping[str, torch.Tensor]) -> None:
        """Enter new rows and new pages.

        Args:
            sent: `table_arrays` of the plan, and maybe more, on the device.
        """
        start = 0
        for new in plan.new_rows:
            end = start + len(new.token_ids)
            self.tokens[new.row, : end - start] = sent["new_tokens"][start:end]
            start = end
        if len(plan.page_ids):
            self.pages[sent["page_rows"], sent["page_numbers"]] = sent["page_ids"]

    def write_tokens(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Enter sampled tokens; all [S] int64, on the device."""
        self.tokens[rows, positions] = token_ids.to(torch.int32)


def table_arrays(plan: StepPlan) -> dict[str, npt.NDArray[Any]]:
    """A plan's differences as arrays; new rows' tokens one after the other."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    if plan.new_rows:
        arrays["new_tokens"] = np.concatenate([new.token_ids for new in plan.new_rows])
    if len(plan.page_ids):
        arrays["page_rows"] = plan.page_rows.astype(np.int64)
        arrays["page_numbers"] = plan.page_numbers.astype(np.int64)
        arrays["page_ids"] = plan.page_ids
    return arrays
