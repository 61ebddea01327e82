"""Unnormalized probabilities of whole rows, and their sums.

Weights are float32, their sums float64. Each row is treated by itself, in an order that does not depend on how many
rows there are: a plain sum over one long row would be split among threads, one over many rows would not.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Neighbouring tokens that are summed before the float64 cumulative sum.
GROUP_WIDTH = 128
# Logits handled at once on a CPU: what stays in its cache, and is not fetched from the kernel anew in each step.
_PART_SIZE = 2**19


def rows_at_once(logits: Tensor) -> int:
    """How many rows to handle at once, so that temporaries are of a good size for the device."""
    return max(1, _PART_SIZE // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))


def relative_weights(logits: Tensor, temperature: Tensor | None = None) -> Tensor:
    """exp((logit - the row's largest) / temperature), [n, V] float32.

    Args:
        logits: [n, V] float32, finite.
        temperature: [n]; None: 1.
    """
    scaled = logits - logits.amax(-1, keepdim=True)
    if temperature is not None:
        scaled.div_(temperature[:, None].to(torch.float32))
    return scaled.exp_()


def cumulative_group_weights(weights: Tensor) -> Tensor:
    """Weight up to and with each group of `GROUP_WIDTH` neighbouring tokens, [n, ceil(V / GROUP_WIDTH)] float64."""
    num_rows, vocab_size = weights.shape
    rest = vocab_size % GROUP_WIDTH
    sums = weights[:, : vocab_size - rest].view(num_rows, -1, GROUP_WIDTH).sum(-1)
    if rest:
        sums = torch.cat([sums, weights[:, vocab_size - rest :].sum(-1, keepdim=True)], dim=1)
    return sums.cumsum(-1, dtype=torch.float64)
