"""Encoders whose code is on the hub and not in transformers: small checkpoints, and plain formulas over them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.checkpoints import VOCAB_SIZE

REMOTE_ENCODERS = ("jina_v2", "jina_v2_code", "nomic_moe")

_BERT: dict[str, Any] = {
    "architectures": ["JinaBertForMaskedLM"],
    "model_type": "bert",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "feed_forward_type": "geglu",
    "position_embedding_type": "alibi",
    "emb_pooler": "mean",
    "pad_token_id": 0,
}
_NOMIC: dict[str, Any] = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "activation_function": "gelu",
    "vocab_size": VOCAB_SIZE,
    "n_embd": 48,
    "n_head": 3,
    "n_inner": 80,
    "n_layer": 4,
    "n_positions": 64,
    "max_trained_positions": 64,
    "type_vocab_size": 1,
    "layer_norm_epsilon": 1e-5,
    "rotary_emb_base": 10000,
    **dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True),
    **dict.fromkeys(("prenorm", "causal", "rotary_emb_interleaved", "expert_choice_router"), False),
    "moe_every_n_layers": 2,
    "moe_top_k": 2,
    "num_experts": 8,
    "num_shared_experts": 0,
    "moe_normalize_expert_weights": False,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "jina_v2": {**_BERT, "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"}},
    "jina_v2_code": {
        **_BERT,
        "auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"},
    },
    "nomic_moe": _NOMIC,
}


def make_remote_encoder(
    folder: Path, family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, prefix: str = "", **fields: Any
) -> Path:
    """Write a small random encoder without a tokenizer, and return its folder (made if needed).

    Args:
        family: one of `REMOTE_ENCODERS`.
        prefix: of the names of all tensors.
        fields: of config.json.
    """
    config = {**_CONFIGS[family], **fields}
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    shapes = _nomic_shapes(config) if family == "nomic_moe" else _jina_shapes(config, is_code=family == "jina_v2_code")
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        vector = 0.2 * noise + (not name.endswith("bias"))
        values = noise / shape[-1] ** 0.5 if len(shape) > 1 else vector
        tensors[prefix + name] = values.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _nomic_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a checkpoint, by name."""
    size, inner, experts = config["n_embd"], config["n_inner"], config["num_experts"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], size),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], size),
    }
    norms, linears = ["emb_ln"], dict[str, tuple[int, int]]()
    for layer in range(config["n_layer"]):
        begin = f"encoder.layers.{layer}"
        norms += [f"{begin}.norm1", f"{begin}.norm2"]
        linears |= {f"{begin}.attn.Wqkv": (3 * size, size), f"{begin}.attn.out_proj": (size, size)}
        if layer % config["moe_every_n_layers"] == 1:
            shapes[f"{begin}.mlp.router.layer.weight"] = (experts, size)
            shapes |= {f"{begin}.mlp.experts.mlp.{name}": (experts * inner, size) for name in ("w1", "w2")}
            shapes[f"{begin}.mlp.experts.bias"] = (size,)
        else:
            linears |= {f"{begin}.mlp.fc1": (inner, size), f"{begin}.mlp.fc2": (size, inner)}
    return _with_biases(shapes, linears, norms, size)


def _jina_shapes(config: Mapping[str, Any], *, is_code: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a checkpoint, by name."""
    size, inner = config["hidden_size"], config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], size),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], size),
    }
    norms, linears = ["embeddings.LayerNorm"], dict[str, tuple[int, int]]()
    for layer in range(config["num_hidden_layers"]):
        begin = f"encoder.layer.{layer}"
        linears |= {f"{begin}.attention.self.{name}": (size, size) for name in ("query", "key", "value")}
        linears |= {f"{begin}.attention.output.dense": (size, size)}
        gated, down = ("up_gated_layer", "down_layer") if is_code else ("gated_layers", "wo")
        shapes[f"{begin}.mlp.{gated}.weight"] = (2 * inner, size)
        linears[f"{begin}.mlp.{down}"] = (size, inner)
        of_code = ("layer_norm_1", "layer_norm_2", "attention.self.layer_norm_q", "attention.self.layer_norm_k")
        own = of_code if is_code else ("mlp.layernorm",)
        norms += [f"{begin}.{name}" for name in ("attention.output.LayerNorm", *own)]
    return _with_biases(shapes, linears, norms, size)


def _with_biases(
    shapes: dict[str, tuple[int, ...]], linears: Mapping[str, tuple[int, int]], norms: list[str], size: int
) -> dict[str, tuple[int, ...]]:
    """All shapes, also those of linear layers and norms with biases."""
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    return shapes | {f"{name}.{kind}": (size,) for name in norms for kind in ("weight", "bias")}


class RemoteOracle:
    """The formulas of an encoder in a folder, for one text at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors = {name: one.to(dtype) for name, one in load_file(folder / "model.safetensors").items()}

    @torch.inference_mode()
    def states(self, text: list[int]) -> torch.Tensor:
        """The last hidden states, [tokens, hidden_size]."""
        x = self._table("embeddings.word_embeddings")[text] + self._table("embeddings.token_type_embeddings")[0]
        if "n_embd" in self.config:
            x = self._norm(x, "emb_ln")
            for layer in range(self.config["n_layer"]):
                x = self._nomic_layer(x, f"encoder.layers.{layer}")
            return x
        x = self._norm(x, "embeddings.LayerNorm")
        for layer in range(self.config["num_hidden_layers"]):
            x = self._jina_layer(x, f"encoder.layer.{layer}")
        return x

    def _jina_layer(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        q, k, v = (self._linear(x, f"{layer}.attention.self.{name}") for name in ("query", "key", "value"))
        is_code = f"{layer}.layer_norm_1.weight" in self.tensors
        if is_code:
            q = self._norm(q, f"{layer}.attention.self.layer_norm_q")
            k = self._norm(k, f"{layer}.attention.self.layer_norm_k")
        places = torch.arange(len(x))
        distances = (places[:, None] - places).abs()
        slopes = torch.tensor(alibi(self.config["num_attention_heads"]), dtype=x.dtype)
        mixed = self._attend(q, k, v, -slopes[:, None, None] * distances)
        attended = self._linear(mixed, f"{layer}.attention.output.dense")
        attended = self._norm(attended + x, f"{layer}.attention.output.LayerNorm")
        if is_code:
            attended = self._norm(attended + x, f"{layer}.layer_norm_1")
            plain, activated = self._linear(attended, f"{layer}.mlp.up_gated_layer").chunk(2, -1)
            down = self._linear(functional.gelu(activated) * plain, f"{layer}.mlp.down_layer")
            return self._norm(down + attended, f"{layer}.layer_norm_2")
        activated, plain = self._linear(attended, f"{layer}.mlp.gated_layers").chunk(2, -1)
        down = self._linear(functional.gelu(activated) * plain, f"{layer}.mlp.wo")
        return self._norm(down + attended, f"{layer}.mlp.layernorm")

    def _nomic_layer(self, x: torch.Tensor, layer: str) -> torch.Tensor:
        q, k, v = self._linear(x, f"{layer}.attn.Wqkv").chunk(3, -1)
        mixed = self._attend(self._turned(q), self._turned(k), v)
        attended = self._norm(self._linear(mixed, f"{layer}.attn.out_proj") + x, f"{layer}.norm1")
        if f"{layer}.mlp.fc1.weight" in self.tensors:
            inner = functional.gelu(self._linear(attended, f"{layer}.mlp.fc1"))
            return self._norm(self._linear(inner, f"{layer}.mlp.fc2") + attended, f"{layer}.norm2")
        return self._norm(self._mixed(attended, f"{layer}.mlp") + attended, f"{layer}.norm2")

    def _mixed(self, x: torch.Tensor, block: str) -> torch.Tensor:
        """The experts of each token, one token after the other."""
        count = self.config["num_experts"]
        first, second = (self.tensors[f"{block}.experts.mlp.{name}"].chunk(count) for name in ("w1", "w2"))
        shares = self._linear(x, f"{block}.router.layer").float().softmax(-1)
        found = []
        for token, share in zip(x, shares, strict=True):
            best = share.argsort(descending=True)[: self.config["moe_top_k"]].tolist()
            parts = [share[e].to(x.dtype) * (functional.gelu(first[e] @ token) @ second[e]) for e in best]
            found.append(sum(parts) + self.tensors[f"{block}.experts.bias"])
        return torch.stack(found)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        """The rope over halves of each head, of [tokens, hidden_size]."""
        heads = x.view(len(x), self.config["n_head"], -1).float()
        size = heads.shape[-1]
        frequencies = self.config["rotary_emb_base"] ** (-torch.arange(0, size, 2) / size)
        angles = (torch.arange(len(x))[:, None] * frequencies)[:, None]
        first, second = heads.chunk(2, -1)
        turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        return torch.cat(turned, -1).flatten(1).to(x.dtype)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | float = 0.0
    ) -> torch.Tensor:
        """Attention of [tokens, hidden_size], to all tokens; `bias`: [heads, tokens, tokens], added to the scores."""
        heads = self.config.get("num_attention_heads") or self.config["n_head"]
        q, k, v = (one.view(len(one), heads, -1).transpose(0, 1) for one in (q, k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias
        return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)

    def _table(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self._table(name), self.tensors.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.config.get("layer_norm_eps") or self.config["layer_norm_epsilon"]
        return functional.layer_norm(x, x.shape[-1:], self._table(name), self.tensors[f"{name}.bias"], eps)


def alibi(heads: int) -> list[float]:
    """The slopes of Press et al. 2021: a geometric sequence, for other numbers than powers of two filled up."""
    lower = 2 ** math.floor(math.log2(heads))
    if lower == heads:
        first = 2 ** (-8 / heads)
        return [first ** (head + 1) for head in range(heads)]
    return [*alibi(lower), *alibi(2 * lower)[::2][: heads - lower]]
