"""The page table and the token table: per-row state on the device, changed only by the differences a plan brings.

The token table closes the loop of overlap scheduling (as in Mini-SGLang): a step writes its sampled tokens there, and
the next step reads its inputs from there, whether or not the host knows them yet.
"""

from __future__ import annotations

import numpy as np
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

    def apply(self, plan: StepPlan) -> None:
        """Enter new rows and new pages."""
        for new in plan.new_rows:
            self.tokens[new.row, : len(new.token_ids)] = torch.from_numpy(new.token_ids)
        if len(plan.page_ids):
            self.pages[_index(plan.page_rows), _index(plan.page_numbers)] = torch.from_numpy(plan.page_ids)

    def write_tokens(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Enter sampled tokens; all [S] int64, on the device."""
        self.tokens[rows, positions] = token_ids.to(torch.int32)


def _index(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))
