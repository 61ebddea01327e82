"""Large zeroed tensors that cost nothing until they are used."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

CACHE_LINE = 64


def zeros(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """A zeroed tensor; on the CPU the kernel hands out its memory page by page as it is first written.

    It starts with a cache line, so that vector loads do not cross two. `torch.zeros` writes every byte at once: seconds
    at start, and memory taken for requests that never come.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(*shape)
