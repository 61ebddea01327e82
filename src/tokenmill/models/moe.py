"""Mixture of experts: a router sends each token to a few experts; tokens of one expert run together."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenmill.models.architecture import MoeSpec
from tokenmill.models.linear import Empty, Linear, Target, product
from tokenmill.models.mlp import gated


class MoE:
    """Experts with stacked weights.

    Attributes:
        gate_up: [experts, 2 * intermediate, hidden].
        down: [experts, hidden, intermediate].
    """

    __slots__ = ("down", "gate_up", "router", "spec")

    def __init__(self, spec: MoeSpec, hidden_size: int, empty: Empty) -> None:
        self.spec = spec
        self.router = Linear(hidden_size, {"gate": spec.num_experts}, False, empty)
        self.gate_up = empty(spec.num_experts, 2 * spec.intermediate_size, hidden_size)
        self.down = empty(spec.num_experts, hidden_size, spec.intermediate_size)

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
                inner = gated(product(inputs[mine], self.gate_up[expert]))
                result.index_add_(0, tokens[mine], product(inner, self.down[expert]).mul_(scales[mine]))
                start += count
        return result

    def targets(self, prefix: str) -> Iterator[Target]:
        """The checkpoint tensors that fill this block."""
        yield from self.router.targets(prefix)
        size = self.spec.intermediate_size
        for expert in range(self.spec.num_experts):
            yield f"{prefix}.experts.{expert}.gate_proj.weight", self.gate_up[expert, :size]
            yield f"{prefix}.experts.{expert}.up_proj.weight", self.gate_up[expert, size:]
            yield f"{prefix}.experts.{expert}.down_proj.weight", self.down[expert]

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, k] in x's dtype and expert ids [T, k]; softmax over all experts, in float32."""
        probabilities = torch.softmax(self.router.forward(x), -1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.spec.experts_per_token, -1)
        if self.spec.norm_topk_prob:
            weights /= weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), experts
