"""How ranks put together what each has computed. A model is given one; alone it costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tokenmill.parallel.shard import Part, Shard

if TYPE_CHECKING:
    from tokenmill import _native


@dataclass(frozen=True, slots=True)
class NativeRoom:
    """For a pass in native code: where ranks meet, and memory that all of them have, by its address."""

    ranks: _native.Ranks
    address: int
    num_bytes: int


class Collective(Protocol):
    """What a rank's decoder needs of the others. All ranks make the same calls in the same order.

    What it returns is shared memory: nobody writes there, and it holds until the second call after.
    """

    @property
    def shard(self) -> Shard:
        """Which rank this is."""

    @property
    def native(self) -> NativeRoom | None:
        """The same for a pass in native code, which takes it all for itself; None: nobody is to be met."""

    def failure(self) -> Exception:
        """What to raise where the others were not met."""

    def columns(self, own: torch.Tensor, part: Part) -> torch.Tensor:
        """This rank's columns [T, part.count] -> those of all, [T, part.total]."""

    def rows(self, own: torch.Tensor, where: torch.Tensor | slice, count: int) -> torch.Tensor:
        """This rank's rows, which stand at `where` -> those of all, [count, columns]. Each row is one rank's."""


class Alone:
    """See `Collective`: one rank, which has everything."""

    shard = Shard()
    native = None

    def failure(self) -> Exception:
        """See `Collective.failure`."""
        return AssertionError("nobody is to be met")

    def columns(self, own: torch.Tensor, part: Part) -> torch.Tensor:
        """See `Collective.columns`."""
        return own

    def rows(self, own: torch.Tensor, where: torch.Tensor | slice, count: int) -> torch.Tensor:
        """See `Collective.rows`."""
        return own


ALONE = Alone()
