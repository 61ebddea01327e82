"""Log probabilities of sampled and of likely tokens: taken where the logits are, told to the frontend as structs.

They are those of the raw logits, before bias, penalties, temperature and filters, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import Logprob, TokenLogprobs
from tokenmill.platform.arrays import address
from tokenmill.platform.host_arrays import library_of

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import Array

# JSON has no -inf; this is what OpenAI's clients and vLLM's know for it.
LOWEST_LOGPROB = -9999.0


class LogprobGroup(msgspec.Struct, frozen=True):
    """Rows that report log probabilities: [n] int64 rows of the logits, and how many likely tokens each asked for."""

    indices: npt.NDArray[np.int64]
    counts: tuple[int, ...]


class LogprobArrays(msgspec.Struct, frozen=True):
    """Log probabilities of n rows, where the logits are; all NaN where a logit of the row is NaN or +inf, or all -inf.

    Attributes:
        indices: [n] int64, rows of the logits; on the host.
        counts: [n], how many likely tokens each row asked for.
        token_ids, logprobs, ranks: [n], the sampled token; rank 1 is the most likely.
        top_ids, top_logprobs: [n, max(counts)], the likely tokens, best first.
    """

    indices: npt.NDArray[np.int64]
    counts: tuple[int, ...]
    token_ids: Array
    logprobs: Array
    ranks: Array
    top_ids: Array
    top_logprobs: Array

    @property
    def numbers(self) -> tuple[Array, Array, Array, Array, Array]:
        """The arrays that are where the logits are, of numbers of eight bytes there."""
        return self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    def with_numbers(self, numbers: Sequence[Array]) -> LogprobArrays:
        """Return the same with other arrays in the place of `numbers`."""
        return LogprobArrays(self.indices, self.counts, *numbers)


def take_logprobs(
    logits: Array, token_ids: Array, group: LogprobGroup, native: _native.Kernels | None = None
) -> LogprobArrays:
    """Take the log probabilities that `group` asks for.

    Args:
        logits: [S, V] float32, raw.
        token_ids: [S] int64, sampled; any where there is none.
        native: kernels of this CPU, whose results are those of float64, rounded once; None: torch's are, within 1e-6.
    """
    # At least one, so that the shapes hold when only the sampled token's are wanted.
    num_top = max(1, *group.counts)
    xp = library_of(logits)
    indices = xp.from_host(group.indices)
    sampled_ids = xp.at_least(token_ids[indices], 0)
    if native is not None:
        found = _take_natively(native, logits, indices, sampled_ids, num_top)
    else:
        from tokenmill.model.sampling import torch_logprobs

        found = torch_logprobs.take(logits, indices, sampled_ids, num_top, LOWEST_LOGPROB)
    return LogprobArrays(group.indices, group.counts, sampled_ids, *found)


def _take_natively(
    native: _native.Kernels, logits: Array, indices: Array, sampled_ids: Array, num_top: int
) -> tuple[Array, Array, Array, Array]:
    """Take them by the kernel of native/isa/logprobs.cpp; see `torch_logprobs.take`."""
    assert logits.dtype == np.float32 and logits.strides[1] == 4, "rows of float32 in one piece"
    assert indices.flags.c_contiguous and sampled_ids.flags.c_contiguous, "each in one piece"
    count = len(indices)
    logprobs, ranks = np.empty(count, np.float32), np.empty(count, np.int32)
    top_ids, top_logprobs = np.empty((count, num_top), np.int64), np.empty((count, num_top), np.float32)
    rows = address(logits), logits.strides[0] // 4, logits.shape[1], count, address(indices), address(sampled_ids)
    own, top = (address(logprobs), address(ranks)), (address(top_ids), address(top_logprobs))
    native.logprobs(*rows, LOWEST_LOGPROB, *own, num_top, *top)
    return logprobs, ranks, top_ids, top_logprobs


def to_messages(arrays: LogprobArrays) -> dict[int, TokenLogprobs]:
    """Return log probabilities that are on the host as structs, keyed by the row of the logits."""
    num_top = arrays.top_ids.shape[1]
    sampled = map(Logprob, arrays.token_ids.tolist(), arrays.logprobs.tolist(), arrays.ranks.tolist())
    # All at once: rows are many, and each asks for few.
    ranks = [*range(1, num_top + 1)] * len(arrays.indices)
    likely = [*map(Logprob, arrays.top_ids.reshape(-1).tolist(), arrays.top_logprobs.reshape(-1).tolist(), ranks)]
    starts = range(0, len(likely), num_top)
    rows = zip(arrays.indices.tolist(), sampled, starts, arrays.counts, strict=True)
    return {index: TokenLogprobs(own, likely[start : start + count]) for index, own, start, count in rows}
