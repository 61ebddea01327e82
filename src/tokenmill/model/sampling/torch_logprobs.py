"""Log probabilities in plain torch: those of a device, and of a host without native kernels; the oracle of theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tokenmill.model.sampling.logprobs import LOWEST_LOGPROB
from tokenmill.model.sampling.ranking import LARGEST, finite, largest

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array

# Neighbouring tokens that are summed before the float64 sum: a plain sum over one long row would be split among
# threads, one over many rows would not.
_GROUP_WIDTH = 128
# Logits handled at once on a CPU: what stays in its cache, and is not fetched from the kernel anew in each step.
_PART_SIZE = 2**19


def take(logits: Array, indices: Array, sampled_ids: Array, num_top: int) -> tuple[Array, Array, Array, Array]:
    """Return logprobs and ranks of sampled tokens, [n] float64 and int64; ids and logprobs of the likely ones,
    [n, num_top].

    Args:
        indices, sampled_ids: [n] int64, rows of the logits and the token of each.
    """
    if isinstance(logits, np.ndarray):
        rows, ids = torch.from_numpy(indices), torch.from_numpy(sampled_ids)
        logprobs, ranks, top_ids, top_logprobs = _take(torch.from_numpy(logits), rows, ids, num_top)
        return logprobs.numpy(), ranks.numpy(), top_ids.numpy(), top_logprobs.numpy()
    return _take(logits, indices, sampled_ids, num_top)


def _take(logits: Tensor, indices: Tensor, sampled_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = max(1, _PART_SIZE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    parts = [
        _take_part(finite(logits[rows]), ids, num_top)
        for rows, ids in zip(indices.split(size), sampled_ids.split(size), strict=True)
    ]
    logprobs, ranks, top_ids, top_logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, ranks.long(), top_ids, top_logprobs


def _take_part(rows: Tensor, sampled_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sampled = rows.gather(1, sampled_ids[:, None])
    highest = rows.amax(-1, keepdim=True)
    normalizer = torch.where(highest.abs() < LARGEST, highest + _total((rows - highest).exp_()).log(), torch.nan)
    ids = torch.arange(rows.shape[1], device=rows.device)
    is_before = (rows > sampled) | ((rows == sampled) & (ids < sampled_ids[:, None]))
    ranks = 1 + is_before.sum(-1, dtype=torch.int32)  # int32: summed in place of a widened copy.
    top, top_ids = largest(rows, num_top)
    return _bounded(sampled - normalizer).squeeze(1), ranks, top_ids, _bounded(top - normalizer)


def _total(weights: Tensor) -> Tensor:
    """Return the sum of each row of [n, V] float32, [n, 1] float64."""
    num_rows, vocab_size = weights.shape
    rest = vocab_size % _GROUP_WIDTH
    sums = weights[:, : vocab_size - rest].view(num_rows, -1, _GROUP_WIDTH).sum(-1)
    if rest:
        sums = torch.cat([sums, weights[:, vocab_size - rest :].sum(-1, keepdim=True)], dim=1)
    return sums.cumsum(-1, dtype=torch.float64)[:, -1:]


def _bounded(logprobs: Tensor) -> Tensor:
    return logprobs.clamp(min=LOWEST_LOGPROB)  # a NaN stays one
