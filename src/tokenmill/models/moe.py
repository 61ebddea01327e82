"""Mixture of experts: a router sends each token to a few experts; tokens of one expert run together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from tokenmill.kernels.protocol import Kernels, WeightRole
from tokenmill.models.architecture import MoeSpec
from tokenmill.models.linear import Linear
from tokenmill.models.targets import Target, TargetScope


class MoE:
    """A router, and experts that are each a gated pair of projections."""

    __slots__ = ("experts", "router", "spec")

    def __init__(self, spec: MoeSpec, hidden_size: int, kernels: Kernels) -> None:
        self.spec = spec
        self.router = Linear(hidden_size, {"router": spec.num_experts}, False, kernels, WeightRole.ROUTER)
        self.experts = kernels.experts(spec.num_experts, hidden_size, spec.size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; a token's result does not depend on the others."""
        return self.experts.mix(x, *self._route(x))

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """The checkpoint tensors that fill this block."""
        yield from self.router.targets(scope)
        size = self.spec.size
        for expert, (gate_up, down) in enumerate(zip(self.experts.gate_up, self.experts.down, strict=True)):
            own = dataclasses.replace(scope, expert=expert)
            yield own.matrix("expert_gate", gate_up, 0, size)
            yield own.matrix("expert_up", gate_up, size, size)
            yield own.matrix("expert_down", down)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, k] in x's dtype and expert ids [T, k]; softmax over all experts, in float32."""
        probabilities = torch.softmax(self.router.forward(x), -1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.spec.experts_per_token, -1)
        if self.spec.norm_topk_prob:
            weights /= weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts
