"""Mixture of experts: a router sends each token to a few experts; tokens of one expert run together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from tokenmill.kernels.adapters import AdaptedLayer
from tokenmill.kernels.protocol import Kernels, WeightRole
from tokenmill.models.architecture import MoeSpec
from tokenmill.models.linear import Linear
from tokenmill.models.targets import Target, TargetScope
from tokenmill.parallel.collective import ALONE, Collective
from tokenmill.parallel.experts import SharedExperts
from tokenmill.parallel.shard import Part


class MoE:
    """A router, and experts that are each a gated pair of projections."""

    __slots__ = ("_mix", "experts", "part", "router", "spec")

    def __init__(self, spec: MoeSpec, hidden_size: int, kernels: Kernels, collective: Collective = ALONE) -> None:
        """Every rank routes for itself; of the experts it has its part."""
        self.spec = spec
        self.part = collective.shard.part(spec.num_experts)
        self.router = Linear(hidden_size, {"router": Part.whole(spec.num_experts)}, False, kernels, WeightRole.ROUTER)
        self.experts = kernels.experts(self.part.count, hidden_size, spec.size)
        is_shared = not self.part.is_whole
        self._mix = SharedExperts(self.experts, self.part, collective).mix if is_shared else self.experts.mix

    def forward(self, x: torch.Tensor, adapted: AdaptedLayer | None = None) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; a token's result does not depend on the others."""
        return self._mix(x, *self._route(x))

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """The checkpoint tensors that fill this block."""
        yield from self.router.targets(scope)
        size, (_, hidden_size) = self.spec.size, self.router.weight.shape
        for expert in range(self.spec.num_experts):
            number, own = expert - self.part.start, dataclasses.replace(scope, expert=expert)
            if 0 <= number < self.part.count:
                gate_up = self.experts.gate_up[number]
                yield own.matrix("expert_gate", gate_up, 0, Part.whole(size))
                yield own.matrix("expert_up", gate_up, size, Part.whole(size))
                yield own.matrix("expert_down", self.experts.down[number])
            else:
                yield own.elsewhere("expert_gate", (size, hidden_size))
                yield own.elsewhere("expert_up", (size, hidden_size))
                yield own.elsewhere("expert_down", (hidden_size, size))

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, k] in x's dtype and expert ids [T, k]; softmax over all experts, in float32."""
        probabilities = torch.softmax(self.router.forward(x), -1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.spec.experts_per_token, -1)
        if self.spec.norm_topk_prob:
            weights /= weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts
