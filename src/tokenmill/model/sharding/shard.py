"""The part of a model that a rank has. Plain data: no torch, no processes.

Layers are shared out over stages of consecutive layers. Within a stage every matrix is split by its output rows,
attention by heads, a mixture of experts by whole experts. So each number is computed by one rank, in the order in which
a rank alone would compute it.

Ranks that share no memory save half of their messages by another form, that of Megatron-LM (Shoeybi et al. 2019): the
second of each pair of matrices is split by its inputs, which are the rank's own outputs of the first, and the ranks'
results are summed. Experts are split as any other pair. Sums of ranks have another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tokenmill.core.errors import InvalidConfig

if TYPE_CHECKING:
    from tokenmill.model.architecture.architecture import Architecture, SelfAttentionSpec

MOST_RANKS = 64
"""As many as native/ranks.h has room for."""


class Part(msgspec.Struct, frozen=True):
    """A range of `total` things: `count` from `start` on."""

    start: int
    count: int
    total: int

    @classmethod
    def whole(cls, total: int) -> Part:
        """Return the part that is all of `total` things."""
        return cls(0, total, total)

    @property
    def stop(self) -> int:
        """End of the range."""
        return self.start + self.count

    @property
    def is_whole(self) -> bool:
        """True if nothing is left out."""
        return self.count == self.total

    def times(self, size: int) -> Part:
        """Return the same part if each thing is made of `size` others."""
        return Part(self.start * size, self.count * size, self.total * size)

    def widened(self, size: int) -> Part:
        """Return the smallest part around it that begins and ends at multiples of `size`."""
        start = self.start // size * size
        return Part(start, -(-self.stop // size) * size - start, self.total)


class Shard(msgspec.Struct, frozen=True):
    """Rank `rank` of the `size` ranks of a stage, which is one of `num_stages`.

    Attributes:
        sums: second matrices of pairs are split by their inputs.
    """

    rank: int = 0
    size: int = 1
    stage: int = 0
    num_stages: int = 1
    sums: bool = False

    @classmethod
    def from_rank(cls, number: int, size: int, num_stages: int) -> Shard:
        """Return the shard of rank `number` of an engine, whose ranks are counted stage after stage."""
        return cls(number % size, size, number // size, num_stages)

    @property
    def is_alone(self) -> bool:
        """True if it has all of the model."""
        return self.size == 1 and self.num_stages == 1

    @property
    def is_first_stage(self) -> bool:
        """True if it has the embedding and the head."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True if it has the final norm."""
        return self.stage == self.num_stages - 1

    def layers(self, architecture: Architecture) -> range:
        """Return its stage's layers."""
        return stage_layers(architecture, self.num_stages)[self.stage]

    def part(self, total: int) -> Part:
        """Return its part of `total` things: as many as the others have, or one more or less."""
        start = self.rank * total // self.size
        return Part(start, (self.rank + 1) * total // self.size - start, total)

    def second(self, inner: Part, size: int) -> tuple[Part, Part]:
        """Return this rank's inputs and outputs of the second of a pair of matrices, with `size` outputs in all.

        Args:
            inner: this rank's outputs of the first.
        """
        return (inner, Part.whole(size)) if self.sums else (Part.whole(inner.total), self.part(size))

    def heads(self, spec: SelfAttentionSpec) -> tuple[Part, Part]:
        """Return its query heads and the KV heads that they attend to; ranks share a KV head if there are too few."""
        start = self.rank * spec.num_kv_heads // self.size
        count = max(1, spec.num_kv_heads // self.size)
        return self.part(spec.num_heads), Part(start, count, spec.num_kv_heads)

    def attention(self, spec: SelfAttentionSpec) -> SelfAttentionSpec:
        """Return the attention that it runs."""
        heads, kv_heads = self.heads(spec)
        return msgspec.structs.replace(spec, num_heads=heads.count, num_kv_heads=kv_heads.count)


def stage_layers(architecture: Architecture, num_stages: int) -> list[range]:
    """Return the layers of each stage, such that the slowest stage reads as few weights a step as possible.

    The head, which is large in a small model, belongs to the first stage: that one has fewer layers then.
    """
    sizes = [layer.num_parameters(architecture.hidden_size) for layer in architecture.layers]
    head, least, most = architecture.vocab_size * architecture.hidden_size, max(sizes), sum(sizes)
    most += head
    while least < most:  # the smallest load that all stages together can be kept within
        load = (least + most) // 2
        least, most = (least, load) if _fill(sizes, head, load, num_stages) else (load + 1, most)
    stages = _fill(sizes, head, most, num_stages)
    assert stages is not None, "everything fits one stage"
    return stages


def _fill(sizes: list[int], head: int, load: int, num_stages: int) -> list[range] | None:
    """Fill stage after stage with layers up to the load, at least one each; None: too many are left for the last."""
    stages, start = [], 0
    for stage in range(num_stages):
        room, stop = load - (head if stage == 0 else 0), start
        while stop < len(sizes) - (num_stages - 1 - stage) and (stop == start or room >= sizes[stop]):
            room -= sizes[stop]
            stop += 1
        stages.append(range(start, stop))
        start = stop
    return stages if start == len(sizes) and room >= 0 else None


def check_size(architecture: Architecture, size: int, num_stages: int = 1, sums: bool = False) -> None:
    """Check that this many stages of this many ranks can share a model, in the form that `Shard.sums` says.

    Raises:
        InvalidConfig: they cannot; says which numbers of them can.
    """
    if architecture.per_layer is not None and (size > 1 or num_stages > 1):
        raise InvalidConfig(
            "a model with per-layer embeddings runs in one process: ranks and stages have no part of them"
        )
    if architecture.recurrences and (size > 1 or num_stages > 1):
        raise InvalidConfig("a model with recurrent states runs in one process: ranks and stages have no part of them")
    if not architecture.needs_kv and (size > 1 or num_stages > 1):
        raise InvalidConfig("an encoder runs in one process: ranks and stages have no part of it")
    if num_stages > len(architecture.layers):
        raise InvalidConfig(
            f"--pipeline-parallel-size {num_stages}: each stage needs a layer, and the model has "
            f"{len(architecture.layers)}"
        )
    if (obstacle := _obstacle(architecture, size, sums)) is None:
        return
    fitting = [str(other) for other in range(1, MOST_RANKS + 1) if _obstacle(architecture, other, sums) is None]
    raise InvalidConfig(f"--tensor-parallel-size {size}: {obstacle}; what works: {', '.join(fitting)}")


def check_context(architecture: Architecture, size: int, on_devices: bool = False) -> None:
    """Check that this many ranks, each with the whole model, can share its contexts.

    Args:
        on_devices: each rank has a device, and a part of the pages there.

    Raises:
        InvalidConfig: they cannot; says why.
    """
    obstacle = None
    if size > MOST_RANKS:
        obstacle = f"at most {MOST_RANKS} ranks share a context"
    elif architecture.recurrences:
        obstacle = "a model with recurrent states has no context to share: its states belong to one process"
    elif not architecture.needs_kv:
        obstacle = "an encoder keeps no context to share; it runs in one process"
    elif on_devices and any(attention.window is not None for attention in architecture.attentions):
        obstacle = "layers with a sliding window have their keys on one GPU"
    if obstacle is not None:
        raise InvalidConfig(f"--context-parallel-size {size}: {obstacle}")


def _obstacle(architecture: Architecture, size: int, sums: bool) -> str | None:
    """Return why `size` ranks cannot share it; None: they can."""
    if size > MOST_RANKS:
        return f"at most {MOST_RANKS} ranks share a model"
    if architecture.hidden_size % size and not sums:
        return f"the model's {architecture.hidden_size} hidden numbers cannot be shared evenly"
    for layer in architecture.layers:
        own = None if layer.attention is None else layer.attention.obstacle(size) or layer.mlp.obstacle(size, sums)
        if own is not None:
            return own
    return None
