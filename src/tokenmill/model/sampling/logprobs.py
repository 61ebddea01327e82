"""Log probabilities of sampled and of likely tokens: taken on the device, told to the frontend as structs.

They are those of the raw logits, before bias, penalties, temperature and filters, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenmill.core.plan import Logprob, TokenLogprobs
from tokenmill.model.sampling.ranking import LARGEST, finite, largest

if TYPE_CHECKING:
    from tokenmill import _native

# JSON has no -inf; this is what OpenAI's clients and vLLM's know for it.
LOWEST_LOGPROB = -9999.0
# Neighbouring tokens that are summed before the float64 sum: a plain sum over one long row would be split among
# threads, one over many rows would not.
_GROUP_WIDTH = 128
# Logits handled at once on a CPU: what stays in its cache, and is not fetched from the kernel anew in each step.
_PART_SIZE = 2**19


@dataclass(frozen=True, slots=True)
class LogprobGroup:
    """Rows that report log probabilities: [n] int64 rows of the logits, and how many likely tokens each asked for."""

    indices: npt.NDArray[np.int64]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log probabilities of n rows, still on the device; all NaN where a logit of the row is NaN or +inf, or all -inf.

    Attributes:
        indices: [n] int64, rows of the logits.
        counts: [n], how many likely tokens each row asked for.
        token_ids, logprobs, ranks: [n], the sampled token; rank 1 is the most likely.
        top_ids, top_logprobs: [n, max(counts)], the likely tokens, best first.
    """

    indices: Tensor
    counts: tuple[int, ...]
    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def take_logprobs(
    logits: Tensor, token_ids: Tensor, group: LogprobGroup, native: _native.Kernels | None = None
) -> LogprobTensors:
    """Take the log probabilities that `group` asks for.

    Args:
        logits: [S, V] float32, raw.
        token_ids: [S] int64, sampled; any where there is none.
        native: kernels of this CPU, whose results are those of float64, rounded once; None: torch's are, within 1e-6.
    """
    # At least one, so that the shapes hold when only the sampled token's are wanted.
    num_top = max(1, *group.counts)
    group_indices = torch.from_numpy(group.indices).to(logits.device, non_blocking=True)
    sampled_ids = token_ids[group_indices].clamp(min=0)
    if native is not None:
        found = _take_natively(native, logits, group_indices, sampled_ids, num_top)
        return LogprobTensors(group_indices, group.counts, sampled_ids, *found)
    size = max(1, _PART_SIZE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    parts = [
        _take_part(finite(logits[indices]), ids, num_top)
        for indices, ids in zip(group_indices.split(size), sampled_ids.split(size), strict=True)
    ]
    logprobs, ranks, top_ids, top_logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return LogprobTensors(group_indices, group.counts, sampled_ids, logprobs, ranks, top_ids, top_logprobs)


def _take_natively(
    native: _native.Kernels, logits: Tensor, indices: Tensor, sampled_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Do `_take_part` for rows `indices` of the logits, by the kernel of native/isa/logprobs.cpp."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "rows of float32 in one piece"
    assert indices.is_contiguous() and sampled_ids.is_contiguous(), "each in one piece"
    count = len(indices)
    logprobs, ranks = torch.empty(count), torch.empty(count, dtype=torch.int32)
    top_ids, top_logprobs = torch.empty(count, num_top, dtype=torch.int64), torch.empty(count, num_top)
    rows = logits.data_ptr(), logits.stride(0), logits.shape[1], count, indices.data_ptr(), sampled_ids.data_ptr()
    own, top = (logprobs.data_ptr(), ranks.data_ptr()), (top_ids.data_ptr(), top_logprobs.data_ptr())
    native.logprobs(*rows, LOWEST_LOGPROB, *own, num_top, *top)
    return logprobs, ranks, top_ids, top_logprobs


def _take_part(rows: Tensor, sampled_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logprobs and ranks of the sampled tokens, [n]; ids and logprobs of the likely ones, [n, num_top]."""
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


def to_messages(tensors: LogprobTensors, batch_indices: Sequence[int] | None = None) -> dict[int, TokenLogprobs]:
    """Bring log probabilities to the host, keyed by batch index.

    Args:
        batch_indices: [S], the batch index of each row of the logits; None: they are the same.
    """
    sampled = zip(tensors.token_ids.tolist(), tensors.logprobs.tolist(), tensors.ranks.tolist(), strict=True)
    tops = zip(tensors.top_ids.tolist(), tensors.top_logprobs.tolist(), tensors.counts, strict=True)
    messages = {}
    for index, own, (ids, logprobs, count) in zip(tensors.indices.tolist(), sampled, tops, strict=True):
        likely = zip(ids[:count], logprobs[:count], range(1, count + 1), strict=True)
        messages[index if batch_indices is None else int(batch_indices[index])] = TokenLogprobs(
            sampled=Logprob(*own), top=[Logprob(*one) for one in likely]
        )
    return messages


def _bounded(logprobs: Tensor) -> Tensor:
    return logprobs.clamp(min=LOWEST_LOGPROB)  # a NaN stays one
