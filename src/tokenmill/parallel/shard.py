"""Which part of a model a rank has. Plain data: no torch, no processes.

Every matrix is split by its output rows, attention by heads, a mixture of experts by whole experts. So each number is
computed by one rank, in the order in which a rank alone would compute it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.core.errors import InvalidConfig

if TYPE_CHECKING:
    from tokenmill.models.architecture import Architecture, SelfAttentionSpec

MOST_RANKS = 64
"""As many as native/ranks.h has room for."""


@dataclass(frozen=True, slots=True)
class Part:
    """Of `total` things in a row, `count` from `start` on."""

    start: int
    count: int
    total: int

    @classmethod
    def whole(cls, total: int) -> Part:
        """All of them."""
        return cls(0, total, total)

    @property
    def stop(self) -> int:
        """Where it ends."""
        return self.start + self.count

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left out."""
        return self.count == self.total

    def times(self, size: int) -> Part:
        """The same part, if each thing is made of `size` others."""
        return Part(self.start * size, self.count * size, self.total * size)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def part(self, total: int) -> Part:
        """Its part of `total` things: as many as the others have, or one more or less."""
        start = self.rank * total // self.size
        return Part(start, (self.rank + 1) * total // self.size - start, total)

    def heads(self, spec: SelfAttentionSpec) -> tuple[Part, Part]:
        """Its query heads, and the KV heads that these attend to: of fewer KV heads than ranks, several have one."""
        start = self.rank * spec.num_kv_heads // self.size
        count = max(1, spec.num_kv_heads // self.size)
        return self.part(spec.num_heads), Part(start, count, spec.num_kv_heads)

    def attention(self, spec: SelfAttentionSpec) -> SelfAttentionSpec:
        """The attention that it runs."""
        heads, kv_heads = self.heads(spec)
        return dataclasses.replace(spec, num_heads=heads.count, num_kv_heads=kv_heads.count)


def check_size(architecture: Architecture, size: int) -> None:
    """See that so many ranks can share a model.

    Raises:
        InvalidConfig: they cannot; says which numbers of ranks can.
    """
    if (obstacle := _obstacle(architecture, size)) is None:
        return
    fitting = [str(other) for other in range(1, MOST_RANKS + 1) if _obstacle(architecture, other) is None]
    raise InvalidConfig(f"--tensor-parallel-size {size}: {obstacle}; what works: {', '.join(fitting)}")


def _obstacle(architecture: Architecture, size: int) -> str | None:
    """Why so many ranks cannot share it; None: they can."""
    if size > MOST_RANKS:
        return f"at most {MOST_RANKS} ranks share a model"
    if architecture.hidden_size % size:
        return f"the model's {architecture.hidden_size} hidden numbers cannot be shared evenly"
    for layer in architecture.layers:
        heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
        if heads % size or (kv_heads % size and size % kv_heads):
            return f"its {heads} query heads and {kv_heads} KV heads cannot be shared evenly"
        num_experts = getattr(layer.mlp, "num_experts", None)
        if num_experts is None and layer.mlp.size % size:
            return f"the {layer.mlp.size} numbers between its projections cannot be shared evenly"
        if num_experts is not None and num_experts < size:
            return f"it has {num_experts} experts, and each is whole on a rank"
    return None
