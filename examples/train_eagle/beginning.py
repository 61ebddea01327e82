"""The weights that training starts from: the best linear guess of the model's next hidden state.

The taps of position p and the embedding of token p + 1 are regressed on the final hidden state at p + 1, which the
model's own head turns into token p + 2. The part of the taps becomes `fc`. That of the embedding goes through
attention: queries and keys begin as one projection of the token, so that a row attends to itself (and to the same token
elsewhere, whose value is the same), and the best matrix of the rank that values have becomes `v_proj` and `o_proj`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from examples.train_eagle.features import Features
from examples.train_eagle.head import EagleHead, SelfAttention
from torch import Tensor, nn

# Share of an input's own variance that is added to it: what is rare is not trusted.
RIDGE = 0.02
# Of queries and keys: a row's score of itself is then 1.5 times the square root of the size of a head.
SHARPNESS = 1.5**0.5
SMALL = 0.1


@torch.no_grad()
def begin(head: EagleHead, features: Features, embedding: Tensor, norm: Tensor, rows: Tensor) -> None:
    """Set the weights of a head.

    Args:
        embedding, norm: the model's, [vocab_size, hidden_size] and [hidden_size]. rows: those of its head that are
            drafted, [draft_vocab_size, hidden_size].
    """
    layer = head.midlayer
    for block in (layer.self_attn, layer.mlp):
        for name, weight in block.named_parameters():
            # Blocks that write to the residual stream begin by writing little.
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5 * (SMALL if "down_proj" in name else 1.0))
    guess = regression(features, embedding, norm)
    # A guess that explains half of what it should is norm-ed to full length: be as sure as it deserves.
    head.norm.weight.copy_(norm * guess.explained**0.5)
    head.lm_head.weight.copy_(rows)
    head.tap_scale.copy_(guess.tap_scale)
    head.fc.weight.copy_(guess.of_taps * guess.tap_scale)
    attend_to_own_token(layer.self_attn, guess.of_tokens)


@dataclass(frozen=True)
class Guess:
    """The best linear guess of the next final hidden state before the norm's weight.

    Attributes:
        of_taps: [hidden_size, num_taps * hidden_size]. of_tokens: [hidden_size, hidden_size], of normed embeddings.
        tap_scale: [num_taps * hidden_size], root mean squares of the taps.
        explained: share of the state's squares.
    """

    of_taps: Tensor
    of_tokens: Tensor
    tap_scale: Tensor
    explained: float


def regression(features: Features, embedding: Tensor, norm: Tensor) -> Guess:
    """Regress final hidden states on the taps one token back and on the token, over all answers."""
    size, count = embedding.shape[1], 0
    squares = products = energy = torch.zeros(())
    for row in features.rows():
        places = row.is_answer[1:].nonzero()[:, 0]
        places = places[places > 0]
        tokens = F.rms_norm(embedding[row.ids[places]], (size,))
        inputs, wanted = torch.cat((row.taps[places - 1], tokens), -1), row.final[places] / norm
        squares, products = squares + inputs.T @ inputs, products + inputs.T @ wanted
        energy, count = energy + wanted.square().sum(), count + len(places)
    scale = (squares.diagonal() / count).sqrt().clamp(min=1e-6)
    squares.diagonal().mul_(1 + RIDGE).add_(1e-6)
    solution = torch.linalg.solve(squares.double(), products.double()).float()
    explained = ((solution * products).sum() / energy).clamp(0.01, 1).item()
    return Guess(solution.T[:, :-size], solution.T[:, -size:], scale[:-size], explained)


def attend_to_own_token(attention: SelfAttention, matrix: Tensor) -> None:
    """Let attention add `matrix` [hidden_size, hidden_size], as nearly as its rank allows, times the normed token."""
    shape, size = attention.shape, len(matrix)
    rank, groups = shape.num_kv_heads * shape.head_dim, shape.num_heads // shape.num_kv_heads
    left, scales, right = torch.linalg.svd(matrix)
    left, scales, right = left[:, :rank], scales[:rank].sqrt(), right[:rank]
    # A row of `x` is the normed token, then the normed hidden state, of which little is used at first.
    for weight in (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight):
        weight[:, size:] *= SMALL
    attention.v_proj.weight[: len(right), :size] = scales[:, None] * right
    projection = torch.randn(shape.num_kv_heads, shape.head_dim, size) * size**-0.5 * SHARPNESS
    attention.k_proj.weight[:, :size] = projection.flatten(0, 1)
    attention.q_proj.weight[:, :size] = projection.repeat_interleave(groups, 0).flatten(0, 1)
    out = torch.zeros(size, rank)
    out[:, : len(scales)] = left * scales
    heads = out.unflatten(1, (shape.num_kv_heads, shape.head_dim)) / groups
    attention.o_proj.weight.copy_(heads.repeat_interleave(groups, 1).flatten(1))
