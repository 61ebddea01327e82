"""Context over ranks: processes that have the whole model each, and share the attention of a step and its KV memory.

All map the KV of all. They share a step of many tokens by rows: each rank runs the layers for tokens of its own, and
meets the others between the writing of keys and their reading. They share a step of few tokens by pieces: each runs
all tokens through the layers and attends the KV splits that lie in its own memory; partial results are merged in the
order in which one rank merges them. Either way no sum changes its order. Knows no processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.model.attention.batch import ForwardBatch

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import AnyArray

# With fewer tokens for each rank their attention is shared: a decode of a long context is, and many short ones are not.
ROWS_PER_RANK = 8


class ContextRanks(Protocol):
    """The ranks that share a context, as one of them sees them. All make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return zeroed memory that all ranks map, the same for all that ask the same number of times."""

    def native(self, output_size: int) -> _native.ContextRanks:
        """Return the meeting place of a native attention whose tokens have so many numbers of output."""

    def meet(self) -> None:
        """Wait until all ranks have come; raise where one does not."""

    def rows(self, own: AnyArray, where: AnyArray | slice, count: int) -> AnyArray:
        """Gather the rows of all ranks, [count, columns]; this rank's stand at `where`. See `Collective.rows`."""

    def failure(self) -> Exception:
        """Return the exception to raise if the other ranks were not met."""


def shares_rows(batch: ForwardBatch, ranks: ContextRanks) -> bool:
    """Return True if ranks share a step by rows: it has enough tokens, and no rank needs those of others."""
    return len(batch.token_ids) >= ROWS_PER_RANK * ranks.size and batch.taps is None


def own_rows(batch: ForwardBatch, rank: int, size: int) -> tuple[ForwardBatch, npt.NDArray[np.int64]]:
    """Return one rank's tokens of a batch on the host as a batch, and the places of its outputs among those of all.

    Tokens are cut into 2 * size chunks, of which a rank has the i-th from the front and from the back: late tokens of a
    prompt see more keys than early ones. A request that is cut appears as several, each with the context of its last
    token.

        |rank 0|rank 1| ... |rank 1|rank 0|
    """
    starts = batch.query_starts
    cuts = _cuts(batch, 2 * size)
    edges = np.unique(np.concatenate([starts, cuts]))
    begins, ends = edges[:-1], edges[1:]
    chunks = np.searchsorted(cuts, begins, "right") - 1
    is_own = np.minimum(chunks, 2 * size - 1 - chunks) == rank
    tokens = np.flatnonzero(np.repeat(is_own, ends - begins))
    begins, ends = begins[is_own], ends[is_own]
    requests = np.searchsorted(starts, begins, "right") - 1
    lens = (ends - begins).astype(np.int32)
    places = np.full(len(batch.token_ids), -1)
    places[tokens] = np.arange(len(tokens))
    outputs = places[batch.output_indices]
    adapters = batch.adapters
    if adapters is not None:
        adapters = msgspec.structs.replace(adapters, of_row=np.ascontiguousarray(adapters.of_row[tokens]))
    own = msgspec.structs.replace(
        batch,
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[tokens],
        slots=batch.slots[tokens],
        page_table=np.ascontiguousarray(batch.page_table[requests]),
        query_lens=lens,
        context_lens=(batch.context_lens[requests] - (starts[requests + 1] - ends)).astype(np.int32),
        query_starts=np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        output_indices=outputs[outputs >= 0],
        adapters=adapters,
        are_own_rows=True,
    )
    return own, np.flatnonzero(outputs >= 0)


def _cuts(batch: ForwardBatch, chunks: int) -> npt.NDArray[np.int64]:
    """Return where chunks of about as many tokens begin and end, [chunks + 1].

    A request is cut at even positions: the values of two tokens lie side by side in packed pages, and whoever writes
    one of them writes its neighbour's again.
    """
    cuts = np.arange(chunks + 1) * len(batch.token_ids) // chunks
    inner = cuts[1:-1]
    requests = np.searchsorted(batch.query_starts, inner, "right") - 1
    positions = batch.context_lens[requests] - (batch.query_starts[requests + 1] - inner)
    cuts[1:-1] -= np.where(inner > batch.query_starts[requests], positions % 2, 0)
    return cuts
