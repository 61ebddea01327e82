"""How ranks put together what each has computed. A model is given one; alone it costs nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tokenmill.model.sharding.shard import Part, Shard

if TYPE_CHECKING:
    from tokenmill import _native


Lookup = Callable[[torch.Tensor], torch.Tensor]
"""[n] int64 -> rows [n, hidden_size] of an embedding, memory of their own."""


@dataclass(frozen=True, slots=True)
class NativeRoom:
    """For a pass in native code: where ranks meet, and memory that all of them have, by its address."""

    ranks: _native.Ranks
    address: int
    num_bytes: int


class Collective(Protocol):
    """What a rank's decoder needs of the others. All ranks make the same calls in the same order.

    What it returns may be shared memory, but for embeddings: nobody writes there, and it holds until the second call
    after.
    """

    @property
    def shard(self) -> Shard:
        """Which rank this is."""

    @property
    def native(self) -> NativeRoom | None:
        """The same for a pass in native code, which takes it all for itself; None: nobody is to be met."""

    def failure(self) -> Exception:
        """What to raise where the others were not met."""

    def between(self, own: torch.Tensor, part: Part) -> torch.Tensor:
        """What the first of a pair of matrices gave, [T, part.count] -> what this rank's second one takes."""

    def behind(self, own: torch.Tensor, part: Part) -> torch.Tensor:
        """What this rank's second one gave, [T, part.count] -> what that of a rank alone gives, [T, part.total]."""

    def embeddings(self, token_ids: torch.Tensor, tokens: Part, lookup: Lookup) -> torch.Tensor:
        """[T] int64 -> [T, hidden_size]; `tokens` are this rank's, whose rows it finds by their number among these."""

    def rows(self, own: torch.Tensor, where: torch.Tensor | slice, count: int) -> torch.Tensor:
        """This rank's rows, which stand at `where` -> those of all, [count, columns]. Each row is one rank's."""


class Alone:
    """See `Collective`: one rank, which has everything."""

    shard = Shard()
    native = None

    def failure(self) -> Exception:
        """See `Collective.failure`."""
        return AssertionError("nobody is to be met")

    def between(self, own: torch.Tensor, part: Part) -> torch.Tensor:
        """See `Collective.between`."""
        return own

    def behind(self, own: torch.Tensor, part: Part) -> torch.Tensor:
        """See `Collective.behind`."""
        return own

    def embeddings(self, token_ids: torch.Tensor, tokens: Part, lookup: Lookup) -> torch.Tensor:
        """See `Collective.embeddings`."""
        return lookup(token_ids)

    def rows(self, own: torch.Tensor, where: torch.Tensor | slice, count: int) -> torch.Tensor:
        """See `Collective.rows`."""
        return own


ALONE = Alone()
