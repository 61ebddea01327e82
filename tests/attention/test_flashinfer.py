"""FlashInfer's page lists: what they hold, and that making them never waits for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenmill.attention.backends.flashinfer import FlashInferAttention
from tokenmill.attention.batch import DeviceLens
from tokenmill.attention.paged import Requests
from tokenmill.attention.protocol import AttentionSpec


class OneDevice(TorchDispatchMode):
    """Every operation has all that it reads and makes on one device; counts them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, made)) if isinstance(leaf, torch.Tensor)]
        assert len({tensor.device for tensor in tensors}) <= 1, f"{func} goes from one device to another"
        self.count += 1
        return made


def planned(contexts: np.ndarray, table: torch.Tensor, page_size: int) -> tuple[torch.Tensor, ...]:
    attention = FlashInferAttention(AttentionSpec(1, 2, 1, 8), page_size, torch.float16, str(table.device), None)
    count = len(contexts)
    # Made on the device: a copy of the host's would be what must not happen.
    lens = DeviceLens(
        torch.tensor(contexts, device=table.device), torch.arange(count + 1, dtype=torch.int32, device=table.device)
    )
    requests = Requests(slice(0, count), table, lens, np.ones(count, dtype=np.int32), contexts)
    with OneDevice() as watch:
        plan = attention.plan(requests)
    assert watch.count > 0
    return plan.arguments


def test_pages_are_those_of_the_table_request_by_request(rng: np.random.Generator) -> None:
    page_size = int(rng.choice([1, 4, 16]))
    contexts = rng.integers(1, 70, int(rng.integers(1, 9))).astype(np.int32)
    counts = -(-contexts // page_size)
    table = torch.from_numpy(rng.integers(0, 1000, (len(contexts), int(counts.max()) + 3)).astype(np.int32))
    starts, bounds, pages, last = planned(contexts, table, page_size)
    assert starts.tolist() == list(range(len(contexts) + 1))
    assert bounds.tolist() == [0, *np.cumsum(counts)]
    assert pages.tolist() == [int(page) for row, count in zip(table, counts, strict=True) for page in row[:count]]
    assert last.tolist() == [(context - 1) % page_size + 1 for context in contexts]


def test_a_plan_neither_reads_from_the_device_nor_copies_to_it(rng: np.random.Generator) -> None:
    """A tensor without memory cannot be read, as one whose memory is elsewhere should not be."""
    contexts = rng.integers(1, 70, 5).astype(np.int32)
    pages = planned(contexts, torch.empty(5, 20, dtype=torch.int32, device="meta"), 4)[2]
    assert pages.shape == (int((-(-contexts // 4)).sum()),)
    assert pages.device.type == "meta"
