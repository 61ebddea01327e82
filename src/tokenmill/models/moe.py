"""Mixture of experts: a router sends each token to a few experts; tokens of one expert run together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenmill.kernels.protocol import Kernels, Matrix, MatrixRole
from tokenmill.models.architecture import MoeSpec
from tokenmill.models.linear import Linear, Target, matrix_target


class MoE:
    """Experts, each a gated pair of projections.

    Attributes:
        gate_up: per expert [2 * intermediate, hidden].
        down: per expert [hidden, intermediate].
    """

    __slots__ = ("down", "gate_up", "router", "spec")

    def __init__(self, spec: MoeSpec, hidden_size: int, kernels: Kernels) -> None:
        self.spec = spec
        self.router = Linear(hidden_size, {"gate": spec.num_experts}, False, kernels, MatrixRole.ROUTER)
        size, experts = spec.intermediate_size, range(spec.num_experts)
        self.gate_up: list[Matrix] = [kernels.matrix(2 * size, hidden_size, MatrixRole.GATED) for _ in experts]
        self.down: list[Matrix] = [kernels.matrix(hidden_size, size) for _ in experts]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden].

        Each token's experts are added in the order of their ids, so its result does not depend on other tokens.
        """
        weights, experts = self._route(x)
        order = experts.flatten().argsort(stable=True)
        tokens = order // self.spec.experts_per_token
        inputs, scales = x[tokens], weights.flatten()[order].unsqueeze(1)
        counts = torch.bincount(experts.flatten(), minlength=self.spec.num_experts).tolist()
        result = torch.zeros_like(x)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                mine = slice(start, start + count)
                inner = self.gate_up[expert].gated(inputs[mine])
                result.index_add_(0, tokens[mine], self.down[expert].multiply(inner).mul_(scales[mine]))
                start += count
        return result

    def targets(self, prefix: str) -> Iterator[Target]:
        """The checkpoint tensors that fill this block."""
        yield from self.router.targets(prefix)
        size = self.spec.intermediate_size
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            yield matrix_target(f"{prefix}.experts.{expert}.gate_proj.weight", gate_up, 0, size)
            yield matrix_target(f"{prefix}.experts.{expert}.up_proj.weight", gate_up, size, size)
            yield matrix_target(f"{prefix}.experts.{expert}.down_proj.weight", down)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, k] in x's dtype and expert ids [T, k]; softmax over all experts, in float32."""
        probabilities = torch.softmax(self.router.forward(x), -1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.spec.experts_per_token, -1)
        if self.spec.norm_topk_prob:
            weights /= weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts
