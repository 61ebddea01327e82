"""An EAGLE-3 head in plain torch (arXiv 2503.01840): one layer that drafts from the hidden states of a model.

Row p has the taps of position p and the embedding of token p + 1, and drafts token p + 2. Deeper drafts of a row go on
from its own output: `forward` gives all depths of all rows at once, as drafting would one by one (training-time test).
Parameters have the names of vLLM's checkpoints. Knows no data, files or optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadShape:
    """Numbers that define a head; those of the model's width and attention are the model's."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    draft_vocab_size: int
    num_taps: int = 3
    rope_theta: float = 10000.0
    rms_eps: float = 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` of any leading shape, normed."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SelfAttention(nn.Module):
    """The projections of grouped-query attention, whose inputs are twice as wide as the model."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        width, q_size, kv_size = (
            2 * shape.hidden_size,
            *(n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads)),
        )
        self.q_proj = nn.Linear(width, q_size, bias=False)
        self.k_proj = nn.Linear(width, kv_size, bias=False)
        self.v_proj = nn.Linear(width, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, [B, num_heads, T, head_dim] each, of [B, T, 2 * hidden_size]."""
        shape = self.shape
        q, k, v = (
            projected(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (rotate(each, positions, shape.rope_theta) for each in (q, k))
        groups = shape.num_heads // shape.num_kv_heads
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., hidden_size] for the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    """The one layer: embedding and hidden state are normed apart and attended to side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(shape)


class EagleHead(nn.Module):
    """The whole head; the model's embedding is handed in and not part of it.

    Attributes:
        tap_scale: [num_taps * hidden_size], what taps are divided by before `fc`. A few of them are a thousand times as
            large as the rest, and one learning rate would not suit all. A checkpoint has it in `fc`.
    """

    tap_scale: Tensor

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.num_taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("tap_scale", torch.ones(shape.num_taps * shape.hidden_size))

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of a checkpoint, whose taps are not divided by anything."""
        weights = {name: weight.detach() for name, weight in self.named_parameters()}
        return {**weights, "fc.weight": weights["fc.weight"] / self.tap_scale}

    def forward(self, taps: Tensor, embedded: Tensor, num_depths: int) -> list[Tensor]:
        """Return the hidden states of each depth, [B, T, hidden_size]: those of depth j draft token p + 2 + j.

        Args:
            taps: [B, T, num_taps * hidden_size].
            embedded: [B, T, hidden_size] of the same tokens; rows whose drafts lie behind their end come out
                meaningless.
        """
        layer, length = self.midlayer, taps.shape[1]
        hidden, positions = self.fc(taps / self.tap_scale), torch.arange(length)
        above = torch.ones(length, length, dtype=torch.bool).triu(1)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        depths = []
        for depth in range(num_depths):
            token = F.pad(embedded[:, depth + 1 :], (0, 0, 0, min(depth + 1, length)))
            x = torch.cat((layer.input_layernorm(token), layer.hidden_norm(hidden)), -1)
            q, k, v = layer.self_attn.project(x, positions + depth)
            keys.append(k)
            values.append(v)
            attended = attend(q, keys, values, above).transpose(1, 2).flatten(2)
            hidden = hidden + layer.self_attn.o_proj(attended)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            depths.append(hidden)
        return depths

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., draft_vocab_size] of hidden states of any depth."""
        return self.lm_head(self.norm(hidden))


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Return `x` [B, heads, T, head_dim] rotated by positions [T], its halves as in Hugging Face's Llama."""
    size = x.shape[-1]
    angles = torch.outer(positions.float(), theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size))
    cos, sin = angles.cos(), angles.sin()
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], above: Tensor) -> Tensor:
    """Return what queries of one depth attend to: rows up to their own at depth 0, and of later depths their own row.

    Args:
        q, keys, values: [B, heads, T, head_dim], of the depths so far.
        above: [T, T], True where a row may not look.
    """
    scale = q.shape[-1] ** -0.5
    scores = [(q @ keys[0].transpose(-1, -2) * scale).masked_fill(above, float("-inf"))]
    scores += [(q * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
    length = keys[0].shape[2]
    weights = torch.softmax(torch.cat(scores, -1) if len(scores) > 1 else scores[0], -1)
    attended = weights[..., :length] @ values[0]
    for depth, value in enumerate(values[1:]):
        attended = attended + weights[..., length + depth : length + depth + 1] * value
    return attended
