"""The attention protocol: what a backend must do, and what every caller may rely on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tokenmill.attention.batch import ForwardBatch
from tokenmill.kernels.heads import HeadNorms, RotaryTables


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of a model's attention.

    Attributes:
        scale: factor on q.k before the softmax.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


class KVMemory(Protocol):
    """The KV memory of a backend: two tensors [layers, ...] whose layout is the backend's own."""

    keys: torch.Tensor
    values: torch.Tensor


class AttentionBackend(Protocol):
    """Causal attention over a paged KV cache. A backend owns the layout of the KV memory (`kv`).

    It takes the fused projection as it is, so that norms, rotation and the write into the cache can be one pass.
    """

    @property
    def name(self) -> str:
        """What it is called on the command line."""

    @property
    def kv(self) -> KVMemory:
        """All pages."""

    def plan(self, batch: ForwardBatch, rotary: RotaryTables) -> Any:
        """Prepare what all layers of one step share; called once a step. The result is passed to every `forward`."""

    def forward(
        self, qkv: torch.Tensor, norms: HeadNorms | None, layer: int, plan: Any, window: int | None = None
    ) -> torch.Tensor:
        """Norm and rotate q and k, write k and v into the cache at the batch's slots, then attend.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], contiguous; may be overwritten.
            window: a token attends to itself and at most `window - 1` tokens before it; None: to all before it.

        Returns:
            [T, num_heads * head_dim] in the dtype of qkv.
        """
