"""Checkpoints whose weights retrieve: an induction head (Olsson et al. 2022), constructed, in the shape of Qwen3.

A token's code is n random signs. What the residual stream holds, and which layer writes it:

    | the token's own code | the code of the token before | the code of the token to come | 1 | 0 ...
    |<--- embedding -----> |<-------- layer 0 ----------->|<-------- layer 1 ----------->|

    layer 0   each token attends to the one before it, by the fast pairs of the rope: their phases tell one place from
              the next
    layer 1   each token attends to those that stand behind a token like itself, by the slow pairs, which a context of
              `max_position` hardly turns, and copies what it finds there

So the last token is followed by what followed it before: a key by its value, a text by itself, at any distance. Other
heads and layers compute keys and values of random weights and add nothing. Everything that attention does is real:
positions, chunks, formats of KV, pages from elsewhere; and only one place of the whole context is right.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

HEAD_DIM = 128
PAIRS = HEAD_DIM // 2
# The score of the token before in layer 0; the next best has a tenth less.
PREVIOUS_SCORE = 300.0
# Pairs that turn by less than so much from one token to the next tell no places apart; those that turn by more than so
# much over the whole context tell no codes apart.
LEAST_TURN, MOST_TURN = 0.1, 0.7
START = 0
"""The id with which every prompt begins: the token behind it has no other place."""


class InductionShape(msgspec.Struct, frozen=True):
    """The shape of a model. By default a small one; Qwen3-0.6B's has 28 layers, 1024 wide, with 16 and 8 heads.

    Attributes:
        match_score: of the right place in layer 1; codes by chance alike score up to two thirds of it. The lower it is,
            the less a format of KV may lose.
    """

    max_position: int = 8448
    vocab_size: int = 8448
    hidden_size: int = 256
    num_layers: int = 3
    num_heads: int = 2
    num_kv_heads: int = 1
    intermediate_size: int = 64
    rope_theta: float = 1e7
    match_score: float = 250.0

    @property
    def turns(self) -> np.ndarray:
        """Radians by which each pair turns from a token to the next, [PAIRS]."""
        return self.rope_theta ** (-np.arange(PAIRS) / PAIRS)

    @property
    def slow_pairs(self) -> list[int]:
        """Pairs that hold codes of tokens before."""
        most = (self.hidden_size - 1) // 6
        slow = np.flatnonzero(self.turns * self.max_position < MOST_TURN)
        return [int(pair) for pair in slow[-most:]]

    @property
    def code_size(self) -> int:
        """Signs of a token's code."""
        return 2 * len(self.slow_pairs)


def make_induction_model(folder: Path, shape: InductionShape, seed: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a checkpoint without a tokenizer, and return its folder (made if needed)."""
    generator = torch.Generator().manual_seed(seed)
    size, hidden = shape.code_size, shape.hidden_size
    assert size >= 24, "too few slow pairs: codes of tokens would be alike"
    codes = torch.randint(0, 2, (shape.vocab_size, size), generator=generator).float() * 2 - 1
    embedding, head = torch.zeros(shape.vocab_size, hidden), torch.zeros(shape.vocab_size, hidden)
    embedding[:, :size], embedding[:, 3 * size] = codes, 1
    head[:, 2 * size : 3 * size] = codes
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(hidden)}
    for layer in range(shape.num_layers):
        weights = _random_layer(shape, generator)
        if layer == 0:
            _attend_to_the_token_before(weights, shape)
        elif layer == 1:
            _attend_behind_equal_tokens(weights, shape)
        tensors |= {f"model.layers.{layer}.{name}.weight": weight for name, weight in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    return folder


def _config(shape: InductionShape) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": HEAD_DIM,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position,
        "tie_word_embeddings": False,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _random_layer(shape: InductionShape, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the weights of a layer that adds nothing."""
    hidden, own, shared = shape.hidden_size, shape.num_heads * HEAD_DIM, shape.num_kv_heads * HEAD_DIM
    sizes = {
        "self_attn.q_proj": (own, hidden),
        "self_attn.k_proj": (shared, hidden),
        "self_attn.v_proj": (shared, hidden),
        "mlp.gate_proj": (shape.intermediate_size, hidden),
        "mlp.up_proj": (shape.intermediate_size, hidden),
    }
    random = {name: torch.randn(size, generator=generator) * hidden**-0.5 for name, size in sizes.items()}
    return {
        **random,
        "self_attn.o_proj": torch.zeros(hidden, own),
        "mlp.down_proj": torch.zeros(hidden, shape.intermediate_size),
        "self_attn.q_norm": torch.ones(HEAD_DIM),
        "self_attn.k_norm": torch.ones(HEAD_DIM),
        "input_layernorm": torch.ones(hidden),
        "post_attention_layernorm": torch.ones(hidden),
    }


def _attend_to_the_token_before(weights: dict[str, torch.Tensor], shape: InductionShape) -> None:
    """Let head 0 copy the code of the token before; a pair j is the numbers j and j + PAIRS of a head.

    Keys all point to phase 0, queries to the phase that the rope adds in a token: |turn * distance - turn| is 0 for the
    token before alone.
    """
    query, key = torch.zeros(HEAD_DIM, shape.hidden_size), torch.zeros(HEAD_DIM, shape.hidden_size)
    one = 3 * shape.code_size
    for pair, turn in enumerate(shape.turns.tolist()):
        if turn >= LEAST_TURN:
            query[pair, one], query[pair + PAIRS, one] = np.cos(turn), -np.sin(turn)
            key[pair, one] = 1
    _set_head(weights, query, key, PREVIOUS_SCORE)
    scale = ((shape.code_size + 1) / shape.hidden_size) ** 0.5  # by which the norm before has divided
    _copy_codes(weights, shape, to=shape.code_size, scale=scale)


def _attend_behind_equal_tokens(weights: dict[str, torch.Tensor], shape: InductionShape) -> None:
    """Let head 0 compare its token's code with those of the tokens before others, and copy the code of the best."""
    size, pairs = shape.code_size, shape.slow_pairs
    query, key = torch.zeros(HEAD_DIM, shape.hidden_size), torch.zeros(HEAD_DIM, shape.hidden_size)
    places = [*pairs, *(pair + PAIRS for pair in pairs)]
    for sign, place in enumerate(places):
        query[place, sign] = 1
        key[place, size + sign] = 1
    _set_head(weights, query, key, shape.match_score)
    _copy_codes(weights, shape, to=2 * size, scale=1.0)


def _set_head(weights: dict[str, torch.Tensor], query: torch.Tensor, key: torch.Tensor, score: float) -> None:
    """Set head 0, whose scores are `score` where query and key agree: norms make the length of both sqrt(HEAD_DIM)."""
    weights["self_attn.q_proj"][:HEAD_DIM] = query
    weights["self_attn.k_proj"][:HEAD_DIM] = key
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        weights[name][:] = (score / HEAD_DIM**0.5) ** 0.5


def _copy_codes(weights: dict[str, torch.Tensor], shape: InductionShape, to: int, scale: float) -> None:
    """Let head 0 write the codes of the tokens that it attends to from place `to` of the residual stream on."""
    value, own = torch.zeros(HEAD_DIM, shape.hidden_size), torch.arange(shape.code_size)
    value[own, own] = 1
    weights["self_attn.v_proj"][:HEAD_DIM] = value
    weights["self_attn.o_proj"][to + own, own] = scale


class Needle(msgspec.Struct, frozen=True):
    """A key and the value that stands behind it in a text, tokens that are nowhere else. `depth`: 0 to 1, its place."""

    key: int
    value: list[int]
    depth: float


def haystack(
    num_tokens: int, depths: list[float], rng: np.random.Generator, vocab_size: int, num_values: int = 8
) -> tuple[list[int], list[Needle]]:
    """Return a text of random tokens that repeat, with a needle at each depth (far enough apart), and the needles.

    The last ids of the vocabulary are those of needles.
    """
    own = 1 + num_values
    first = vocab_size - len(depths) * own
    text = rng.integers(1, first, num_tokens)
    text[0] = START
    needles = []
    for number, depth in enumerate(depths):
        ids = np.arange(first + number * own, first + (number + 1) * own)
        place = 1 + int(depth * (num_tokens - own - 1))
        text[place : place + own] = ids
        needles.append(Needle(int(ids[0]), ids[1:].tolist(), depth))
    return text.tolist(), needles
