"""Muon for the matrices of the layers, AdamW for the embedding and the norms, over float32 master weights.

The model itself stays in bfloat16, so that forward and backward use the CPU's bf16 dot products; every update is made
on a float32 copy and rounded back. Muon is Jordan et al. 2024, with the update scale of Liu et al. 2025 ("Muon is
scalable for LLM training"), so that one learning rate serves both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Newton-Schulz iteration towards the nearest orthogonal matrices; ``[n, rows, cols]``, any float dtype."""
    a, b, c = COEFFICIENTS
    x = matrices.to(torch.bfloat16)
    wide = x.shape[1] > x.shape[2]
    if wide:
        x = x.mT
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if wide else x).float()


class MasterOptimizer:
    """Updates a bf16 model from its gradients; its state is a flat dict of tensors for safetensors."""

    def __init__(self, model: nn.Module, weight_decay: float = 0.02) -> None:
        self.weight_decay = weight_decay
        self.parameters = dict(model.named_parameters())
        self.master = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.master.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.master.items() if not self._muon(name)}
        self.steps = 0

    def _muon(self, name: str) -> bool:
        return self.master[name].ndim == 2 and "embed" not in name

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update with learning rate ``rate``; gradients are consumed."""
        self.steps += 1
        by_shape: dict[torch.Size, list[str]] = {}
        for name, master in self.master.items():
            if self._muon(name):
                by_shape.setdefault(master.shape, []).append(name)
            else:
                self._adam(name, rate)
        for shape, names in by_shape.items():
            self._muon_step(shape, names, rate)
        for name, parameter in self.parameters.items():
            parameter.copy_(self.master[name])
            parameter.grad = None

    def _gradient(self, name: str) -> Tensor:
        gradient = self.parameters[name].grad
        assert gradient is not None, f"no gradient for {name}"
        return gradient.float()

    def _muon_step(self, shape: torch.Size, names: list[str], rate: float) -> None:
        updates = []
        for name in names:
            gradient = self._gradient(name)
            self.first[name].lerp_(gradient, 0.05)
            updates.append(gradient.lerp(self.first[name], 0.95))
        scale = 0.2 * max(shape) ** 0.5
        for name, update in zip(names, orthogonalize(torch.stack(updates)), strict=True):
            self.master[name].mul_(1 - rate * self.weight_decay).add_(update, alpha=-rate * scale)

    def _adam(self, name: str, rate: float) -> None:
        gradient = self._gradient(name)
        self.first[name].lerp_(gradient, 0.1)
        self.second[name].lerp_(gradient.square(), 0.02)
        first = self.first[name] / (1 - 0.9**self.steps)
        second = self.second[name] / (1 - 0.98**self.steps)
        self.master[name].addcdiv_(first, second.sqrt() + 1e-10, value=-rate)

    def state(self) -> dict[str, Tensor]:
        """Master weights and moments, for a checkpoint."""
        groups = {"master": self.master, "first": self.first, "second": self.second}
        return {f"{group}/{name}": t for group, tensors in groups.items() for name, t in tensors.items()}

    @torch.no_grad()
    def load(self, state: dict[str, Tensor], steps: int) -> None:
        """Restore what ``state`` gave, and the bf16 model from it."""
        for key, tensor in self.state().items():
            tensor.copy_(state[key])
        self.steps = steps
        for name, parameter in self.parameters.items():
            parameter.copy_(self.master[name])
