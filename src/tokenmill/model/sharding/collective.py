"""Combine the results of ranks. A model is given a collective; for a rank alone it costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec

from tokenmill.model.sharding.shard import Part, Shard

if TYPE_CHECKING:
    from tokenmill import _native
    from tokenmill.platform.arrays import AnyArray


Lookup: TypeAlias = "Callable[[AnyArray], AnyArray]"
"""[n] int64 -> rows [n, hidden_size] of an embedding, memory of their own."""


class NativeRoom(msgspec.Struct, frozen=True):
    """A meeting place for a pass in native code: the ranks, and memory that all of them share, by its address."""

    ranks: _native.Ranks
    address: int
    num_bytes: int


class Collective(Protocol):
    """Communication of a rank's decoder with the other ranks. All ranks make the same calls in the same order.

    Arrays are of the decoder's library. Results other than embeddings may be shared memory: they must not be written
    to, and hold until the second call after.
    """

    @property
    def shard(self) -> Shard:
        """The shard of this rank."""

    @property
    def native(self) -> NativeRoom | None:
        """The meeting place for a pass in native code, which uses all of it; None: no such pass meets other ranks."""

    def failure(self) -> Exception:
        """Return the exception to raise if the other ranks were not met."""

    def between(self, own: AnyArray, part: Part) -> AnyArray:
        """Turn this rank's output of the first of a pair of matrices, [T, part.count], into the input of its second."""

    def behind(self, own: AnyArray, part: Part) -> AnyArray:
        """Turn this rank's output of the second, [T, part.count], into that of a rank alone, [T, part.total]."""

    def embeddings(self, token_ids: AnyArray, tokens: Part, lookup: Lookup) -> AnyArray:
        """Embed [T] int64 -> [T, hidden_size]; `lookup` takes the numbers of tokens among this rank's `tokens`."""

    def rows(self, own: AnyArray, where: AnyArray | slice, count: int) -> AnyArray:
        """Gather the rows of all ranks, [count, columns]; this rank's stand at `where`. Each row is one rank's."""


class Alone:
    """A collective of one rank, which has everything."""

    shard = Shard()
    native = None

    def failure(self) -> Exception:
        """Return an assertion error: there are no ranks to meet."""
        return AssertionError("a rank alone meets no other")

    def between(self, own: AnyArray, part: Part) -> AnyArray:
        """Return the output as it is."""
        return own

    def behind(self, own: AnyArray, part: Part) -> AnyArray:
        """Return the output as it is."""
        return own

    def embeddings(self, token_ids: AnyArray, tokens: Part, lookup: Lookup) -> AnyArray:
        """Look up all tokens."""
        return lookup(token_ids)

    def rows(self, own: AnyArray, where: AnyArray | slice, count: int) -> AnyArray:
        """Return the rows as they are."""
        return own


ALONE = Alone()
