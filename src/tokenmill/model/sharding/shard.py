"""Which part of a model a rank has. Plain data: no torch, no processes.

Layers are shared out over stages, each of which has some that follow each other. Within a stage every matrix is split
by its output rows, attention by heads, a mixture of experts by whole experts. So each number is computed by one rank,
in the order in which a rank alone would compute it.

Where ranks share no memory, half of what they would tell each other is saved by another form, that of Megatron-LM
(Shoeybi et al. 2019): of each pair of matrices the second is split by its inputs, which are what the first one gave
there, and the ranks' results are summed. Experts are split as any other pair. Sums of ranks have another order.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.core.errors import InvalidConfig

if TYPE_CHECKING:
    from tokenmill.model.architecture.architecture import Architecture, SelfAttentionSpec

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
    def of(cls, number: int, size: int, num_stages: int) -> Shard:
        """The shard of rank `number` of an engine, whose ranks are counted stage after stage."""
        return cls(number % size, size, number // size, num_stages)

    @property
    def is_alone(self) -> bool:
        """Whether it has all of the model."""
        return self.size == 1 and self.num_stages == 1

    @property
    def is_first_stage(self) -> bool:
        """Whether it has the embedding and the head."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the final norm."""
        return self.stage == self.num_stages - 1

    def layers(self, architecture: Architecture) -> range:
        """Its stage's layers."""
        return stage_layers(architecture, self.num_stages)[self.stage]

    def part(self, total: int) -> Part:
        """Its part of `total` things: as many as the others have, or one more or less."""
        start = self.rank * total // self.size
        return Part(start, (self.rank + 1) * total // self.size - start, total)

    def second(self, inner: Part, size: int) -> tuple[Part, Part]:
        """Of the second of a pair of matrices, with `size` outputs in all: which inputs and outputs are this rank's.

        Args:
            inner: which outputs of the first are.
        """
        return (inner, Part.whole(size)) if self.sums else (Part.whole(inner.total), self.part(size))

    def heads(self, spec: SelfAttentionSpec) -> tuple[Part, Part]:
        """Its query heads, and the KV heads that these attend to: of fewer KV heads than ranks, several have one."""
        start = self.rank * spec.num_kv_heads // self.size
        count = max(1, spec.num_kv_heads // self.size)
        return self.part(spec.num_heads), Part(start, count, spec.num_kv_heads)

    def attention(self, spec: SelfAttentionSpec) -> SelfAttentionSpec:
        """The attention that it runs."""
        heads, kv_heads = self.heads(spec)
        return dataclasses.replace(spec, num_heads=heads.count, num_kv_heads=kv_heads.count)


def stage_layers(architecture: Architecture, num_stages: int) -> list[range]:
    """The layers of each stage, so that the slowest reads as few weights a step as can be.

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
    """Layers, stage after stage, each filled up to the load, and none without a layer; None: too many for the last."""
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
    """See that so many stages of so many ranks can share a model, in the form that `Shard.sums` says.

    Raises:
        InvalidConfig: they cannot; says which numbers of them can.
    """
    if architecture.per_layer is not None and (size > 1 or num_stages > 1):
        raise InvalidConfig(
            "a model with per-layer embeddings runs in one process: ranks and stages have no part of them"
        )
    if architecture.recurrences and (size > 1 or num_stages > 1):
        raise InvalidConfig("a model with recurrent states runs in one process: ranks and stages have no part of them")
    if num_stages > len(architecture.layers):
        raise InvalidConfig(
            f"--pipeline-parallel-size {num_stages}: each stage needs a layer, and the model has "
            f"{len(architecture.layers)}"
        )
    if (obstacle := _obstacle(architecture, size, sums)) is None:
        return
    fitting = [str(other) for other in range(1, MOST_RANKS + 1) if _obstacle(architecture, other, sums) is None]
    raise InvalidConfig(f"--tensor-parallel-size {size}: {obstacle}; what works: {', '.join(fitting)}")


def _obstacle(architecture: Architecture, size: int, sums: bool) -> str | None:
    """Why so many ranks cannot share it; None: they can."""
    if size > MOST_RANKS:
        return f"at most {MOST_RANKS} ranks share a model"
    if architecture.hidden_size % size and not sums:
        return f"the model's {architecture.hidden_size} hidden numbers cannot be shared evenly"
    for layer in architecture.layers:
        if layer.attention is None:
            continue
        heads, kv_heads = layer.attention.num_heads, layer.attention.num_kv_heads
        if heads % size or (kv_heads % size and size % kv_heads):
            return f"its {heads} query heads and {kv_heads} KV heads cannot be shared evenly"
        num_experts = None if sums else getattr(layer.mlp, "num_experts", None)
        if num_experts is None and layer.mlp.size % size:
            return f"the {layer.mlp.size} numbers between its projections cannot be shared evenly"
        if num_experts is not None and num_experts < size:
            return f"it has {num_experts} experts, and each is whole on a rank"
    return None
