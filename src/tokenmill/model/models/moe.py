"""Mixture of experts: a router sends each token to a few experts; tokens of one expert run together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from tokenmill.model.architecture.mlp_spec import MlpSpec, MoeSpec, SigmoidSpec
from tokenmill.model.architecture.norm_spec import NormSpec
from tokenmill.model.kernels.experts import PlainExperts
from tokenmill.model.kernels.protocol import Activation, Experts, Gate, Kernels, SigmoidScores, WeightRole
from tokenmill.model.models.linear import Linear
from tokenmill.model.models.mlp import MLP
from tokenmill.model.models.norm import RMSNorm
from tokenmill.model.models.targets import Target, TargetScope
from tokenmill.model.sharding.collective import ALONE, Collective
from tokenmill.model.sharding.shard import Part

if TYPE_CHECKING:
    import torch

    from tokenmill.model.kernels.adapters import AdaptedLayer


class MoE:
    """A router, and experts that are each a gated pair of projections, or a single one, and one back.

    Every rank routes for itself. It has some of the experts or, where ranks sum, a part of each.

    Attributes:
        shared: an expert that every token is sent to, by as much as `shared_gate` lets through, or wholly; None.
        scores: None: a softmax.
        scales: [experts], factors on their weights; None: absent.
        norms: the block's own; None: it takes what the layer's norm gives.
        part: this rank's experts. inner: this rank's part of the numbers between the projections of each.
    """

    __slots__ = (
        "_collective",
        "_kernels",
        "_mix",
        "experts",
        "inner",
        "norms",
        "part",
        "router",
        "scales",
        "scores",
        "shared",
        "shared_gate",
        "spec",
    )

    def __init__(self, spec: MoeSpec, hidden_size: int, kernels: Kernels, collective: Collective = ALONE) -> None:
        shard, every, self._collective = collective.shard, Part.whole(spec.num_experts), collective
        self.spec, self._kernels = spec, kernels
        self.part = every if shard.sums else shard.part(spec.num_experts)
        self.inner = shard.part(spec.size) if shard.sums else Part.whole(spec.size)
        self.router = Linear(hidden_size, {"router": every}, spec.has_biases, kernels, WeightRole.ROUTER)
        sizes = self.part.count, hidden_size, self.inner.count
        if spec.is_gated:
            self.experts: Experts = kernels.experts(*sizes, Gate[spec.activation.upper()], spec.has_biases)
        else:
            assert self.part.is_whole and self.inner.is_whole, "ranks share no experts without gates"
            activation = Activation[spec.activation.upper()]
            self.experts = PlainExperts(sizes, activation, kernels, has_output_bias=spec.has_output_bias)
        is_shared = not self.part.is_whole
        self.shared: MLP | None = None
        self.shared_gate: Linear | None = None
        if spec.shared_size:
            shared = MlpSpec(spec.shared_size, activation=spec.activation)
            # A block beside the experts has the names of a dense layer's.
            self.shared = MLP(shared, hidden_size, kernels, collective, "shared_" if spec.norm is None else "")
        if spec.shared_size and spec.has_shared_gate:
            self.shared_gate = Linear(hidden_size, {"shared_switch": Part.whole(1)}, False, kernels, WeightRole.ROUTER)
        self.scores = None if spec.sigmoid is None else _scores(spec.sigmoid, spec.num_experts, kernels)
        self.scales = kernels.vector(spec.num_experts) if spec.has_scales else None
        self.norms = None if spec.norm is None else MixtureNorms(hidden_size, spec.norm, kernels)
        self._mix = SharedExperts(self.experts, self.part, collective).mix if is_shared else self.experts.mix

    def forward(self, x: torch.Tensor, adapted: AdaptedLayer | None = None) -> torch.Tensor:
        """Apply the block: [T, hidden] -> [T, hidden]; a token's result does not depend on the others."""
        mixed = self._mixed(x, x)
        if self.shared is None:
            return mixed
        if self.shared_gate is None:
            return self._kernels.scaled_sum(mixed, 1.0, self.shared.forward(x))
        return self._kernels.add_gated(mixed, self.shared.forward(x), self.shared_gate.forward(x))

    def forward_apart(self, x: torch.Tensor, hidden: torch.Tensor, norms: MixtureNorms) -> torch.Tensor:
        """Apply a block with norms of its own.

        Args:
            x: [T, hidden], the layer's norm of the hidden states, for the expert of all tokens.
            hidden: [T, hidden], the hidden states.
        """
        assert self.shared is not None and self.shared_gate is None, "experts stand beside a block of all tokens"
        mixed = norms.mixed.forward(self._mixed(norms.routed(hidden), norms.inputs.forward(hidden)))
        return self._kernels.scaled_sum(mixed, 1.0, norms.shared.forward(self.shared.forward(x)))

    def _mixed(self, routed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return what a token's experts make of x together, [T, hidden]. `routed`: what the router takes."""
        mixed = self._mix(x, *self._route(routed))
        return mixed if self.inner.is_whole else self._collective.behind(mixed, Part.whole(mixed.shape[1]))

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill this block."""
        yield from self.router.targets(scope)
        if self.shared is not None:
            yield from self.shared.targets(scope)
        if self.shared_gate is not None:
            yield from self.shared_gate.targets(scope)
        if self.scores is not None and self.scores.bias is not None:
            yield scope.vector("experts", self.scores.bias, "expert_bias")
        if self.scales is not None:
            yield scope.vector("mixture", self.scales, "per_expert_scale")
        if self.norms is not None:
            yield from self.norms.targets(scope)
        if isinstance(self.experts, PlainExperts):
            yield from self._plain_targets(scope, self.experts)
            return
        size, (_, hidden_size) = self.spec.size, self.router.weight.shape
        for expert in range(self.spec.num_experts):
            number, own = expert - self.part.start, msgspec.structs.replace(scope, expert=expert)
            if 0 <= number < self.part.count:
                gate_up = self.experts.gate_up[number]
                yield own.matrix("expert_gate", gate_up, 0, self.inner)
                yield own.matrix("expert_up", gate_up, self.inner.count, self.inner)
                yield own.matrix("expert_down", self.experts.down[number], columns=self.inner)
                yield from self._biases(own, number)
            else:
                yield own.elsewhere("expert_gate", (size, hidden_size))
                yield own.elsewhere("expert_up", (size, hidden_size))
                yield own.elsewhere("expert_down", (hidden_size, size))
                if self.spec.has_biases:
                    for role, outputs in {"expert_gate": size, "expert_up": size, "expert_down": hidden_size}.items():
                        yield own.vector_elsewhere(role, outputs, "bias")

    def _plain_targets(self, scope: TargetScope, experts: PlainExperts) -> Iterator[Target]:
        for expert, (up, down) in enumerate(zip(experts.up, experts.down, strict=True)):
            own = msgspec.structs.replace(scope, expert=expert)
            yield own.matrix("expert_up", up)
            yield own.matrix("expert_down", down)
        if experts.bias is not None:
            yield scope.vector("experts", experts.bias, "bias")

    def _biases(self, scope: TargetScope, number: int) -> Iterator[Target]:
        if self.experts.biases is None:
            return
        first, second = (bias[number] for bias in self.experts.biases)
        yield scope.vector("expert_gate", first[: self.inner.count], "bias", self.inner)
        yield scope.vector("expert_up", first[self.inner.count :], "bias", self.inner)
        if self.inner.start == 0:
            yield scope.vector("expert_down", second, "bias")
        else:  # another rank adds it
            second[:] = 0
            yield scope.vector_elsewhere("expert_down", len(second), "bias")

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights [T, k] in x's dtype and expert ids [T, k], from scores of all experts in float32."""
        spec, logits = self.spec, self.router.forward(x)
        weights, experts = self._kernels.route(logits, spec.experts_per_token, spec.norm_topk_prob, self.scores)
        if self.scales is None:
            return weights, experts
        from tokenmill.model.kernels.stored_tensors import tensor_over

        return self._kernels.multiply(weights, tensor_over(self.scales)[experts]), experts


def _scores(spec: SigmoidSpec, num_experts: int, kernels: Kernels) -> SigmoidScores:
    # Rounded to a narrow type, close scores would choose other experts.
    return SigmoidScores(kernels.vector(num_experts, is_wide=True) if spec.has_bias else None, spec.scale)


class MixtureNorms:
    """The norms of a mixture beside a dense block (Gemma 4), each over the hidden size.

    Attributes:
        router: of what the router takes, which is multiplied by `router_scale`, too. inputs: of what the experts take.
        mixed: of what the experts give together. shared: of what the block of all tokens gives.
    """

    __slots__ = ("_kernels", "inputs", "mixed", "router", "router_scale", "shared")

    def __init__(self, size: int, spec: NormSpec, kernels: Kernels) -> None:
        self.router, self.inputs, self.mixed, self.shared = (RMSNorm(size, spec, kernels) for _ in range(4))
        self.router_scale = size**-0.5
        self._kernels = kernels

    def routed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the router takes, a new tensor [T, size]."""
        return self._kernels.scaled_sum(self.router.forward(hidden), self.router_scale)

    def targets(self, scope: TargetScope) -> Iterator[Target]:
        """Yield the checkpoint tensors that fill the norms."""
        yield scope.vector("mixture", self.router.weight, "scale")
        yield from self.inputs.targets(scope, "expert_norm")
        yield from self.mixed.targets(scope, "expert_out_norm")
        yield from self.shared.targets(scope, "shared_out_norm")


class SharedExperts:
    """A layer's experts, of which some are this rank's: expert parallelism with all tokens on all ranks.

    Sorted by expert, the rows that a rank computes stand together. So ranks gather rows, and each adds up all of them,
    expert after expert, as `LoopedExperts` does: the same bits.

    Args:
        own: this rank's experts. part: their place among all.
    """

    __slots__ = ("_collective", "own", "part")

    def __init__(self, own: Experts, part: Part, collective: Collective) -> None:
        self.own = own
        self.part = part
        self._collective = collective

    def mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Run this rank's experts, gather the rows of all ranks, and add them up for each token."""
        order = experts.flatten().argsort(stable=True)
        tokens, scales = order // experts.shape[1], weights.flatten()[order].unsqueeze(1)
        counts = experts.flatten().bincount(minlength=self.part.total)
        ends = [0, *counts.cumsum(0).tolist()]
        mine = slice(ends[self.part.start], ends[self.part.stop])
        inputs, outputs = x[tokens[mine]], x.new_empty(mine.stop - mine.start, x.shape[1])
        for number in range(self.part.count):
            expert = self.part.start + number
            rows = slice(ends[expert] - mine.start, ends[expert + 1] - mine.start)
            if rows.start < rows.stop:
                outputs[rows] = self.own.one(number, inputs[rows]) * scales[mine][rows]
        all_outputs = self._collective.rows(outputs, mine, len(order))
        result = x.new_zeros(x.shape)
        for start, end in pairwise(ends):
            if start < end:
                result.index_add_(0, tokens[start:end], all_outputs[start:end])
        return result
