"""Large zeroed tensors that cost nothing until they are used."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch


def zeros(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device) -> torch.Tensor:
    """A zeroed tensor; on the CPU the kernel hands out its memory page by page as it is first written.

    `torch.zeros` writes every byte at once: seconds at start, and memory taken for requests that never come.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(*shape)
