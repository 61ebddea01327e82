"""A small Qwen3 decoder for training, in plain PyTorch.

Role: the same arithmetic as Hugging Face's ``Qwen3ForCausalLM`` (RMSNorm, QK-norm, rotary embedding, grouped
query attention, SwiGLU, tied embeddings), for whole right-padded batches, with parameter names that export to
a Hugging Face checkpoint one to one. It knows nothing of data, optimizers, caches or generation.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelShape:
    """The numbers that define a model; ``vocab_size`` must cover the tokenizer."""

    vocab_size: int = 2560
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 768
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    max_positions: int = 2048

    def to_json(self) -> dict[str, int | float]:
        """The shape as a JSON object, as it is stored beside a checkpoint."""
        return asdict(self)


SHORT_ROW = 200
MAIN_SHAPE = ModelShape()
DRAFT_SHAPE = ModelShape(hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=384)


def rotary_tables(shape: ModelShape, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine tables, float32 ``[length, head_dim]``, halves repeated as in Hugging Face's Qwen3."""
    dims = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    inverse = shape.rope_theta ** (-dims / shape.head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; accumulates in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``x`` of any leading shape; the result has the dtype of ``x``."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to ``x`` ``[batch, heads, time, head_dim]``."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, all ``[batch, heads, time, head_dim]``.

    On a CPU the flash kernel's backward is slow for short rows: two plain matrix products take half its time.
    """
    time = q.shape[2]
    if time > SHORT_ROW:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    hidden = torch.ones(time, time, dtype=torch.bool, device=q.device).triu(1)
    return F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1).to(q.dtype) @ v


class Attention(nn.Module):
    """Causal grouped-query attention with QK-norm, as in Qwen3."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` is ``[batch, time, hidden]``; padding must sit on the right, where causality hides it."""
        shape, (batch, time, _) = self.shape, x.shape
        q = self.q_norm(self.q_proj(x).view(batch, time, shape.num_heads, shape.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, time, shape.num_kv_heads, shape.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, time, shape.num_kv_heads, shape.head_dim).transpose(1, 2)
        groups = shape.num_heads // shape.num_kv_heads
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = causal_attention(q, k, v)
        return self.o_proj(out.transpose(1, 2).reshape(batch, time, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to ``[..., hidden]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[batch, time, hidden]`` to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embedding, layers and final norm: token ids to hidden states."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_eps)

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``ids`` int64 ``[batch, time]`` to hidden states ``[batch, time, hidden]``."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """Mean cross entropy, float32, of ``logits`` ``[n, vocab]``; written out so that a compiler can fuse it."""
    wide = logits.float()
    return (torch.logsumexp(wide, -1) - wide.gather(1, wanted[:, None])[:, 0]).mean()


class DemoModel(nn.Module):
    """The whole model. ``state_dict`` keys are those of Hugging Face's Qwen3 (tied head: no ``lm_head``)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.cross_entropy = cross_entropy
        self.model = Backbone(shape)
        cos, sin = rotary_tables(shape, shape.max_positions)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal initialization; the projections that write to the residual stream start smaller."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
            if "o_proj" in name or "down_proj" in name:
                std /= (2 * self.shape.num_layers) ** 0.5
            nn.init.normal_(parameter, std=std)

    def compile(self) -> None:  # type: ignore[override]
        """Compile the layers and the loss for rows of any length."""
        self.model.forward = torch.compile(self.model.forward, dynamic=True)  # type: ignore[method-assign]
        self.cross_entropy = torch.compile(cross_entropy, dynamic=True)

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states ``[batch, time, hidden]`` of right-padded ``ids`` ``[batch, time]``."""
        dtype = self.model.norm.weight.dtype
        time = ids.shape[1]
        return self.model(ids, self.cos[:time].to(dtype), self.sin[:time].to(dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., vocab_size]`` of chosen hidden states."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def loss(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Mean cross entropy, float32, over the tokens where ``mask`` ``[batch, time]`` is true."""
        hidden = self.hidden(ids)[:, :-1]
        chosen = mask[:, 1:]
        return self.cross_entropy(self.logits(hidden[chosen]), ids[:, 1:][chosen])
