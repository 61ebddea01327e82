"""Random EAGLE-3 heads in the forms of vLLM, SGLang and speculators, and what they are to draft: the formulas in torch.

The reference knows no pages, steps or caches: it runs all pairs of one text at once, then one more for each draft. It
is written from the paper and from what checkpoints name, in float64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FORMS = ("vllm", "sglang", "speculators")
NAMES = {"vllm": "LlamaForCausalLMEagle3", "sglang": "Eagle3LlamaForCausalLM", "speculators": "Eagle3Speculator"}


@dataclass(frozen=True)
class HeadShape:
    """What a random head is to be."""

    form: str = "vllm"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 48
    num_draft_tokens: int | None = None
    boundaries: tuple[int, ...] | None = None
    has_embedding: bool = False
    has_head: bool = True
    max_position: int = 512
    flags: Mapping[str, Any] = field(default_factory=dict)


def make_head(folder: Path, target: Path, shape: HeadShape, seed: int) -> Path:
    """Write a random head for a model's folder; return the head's folder."""
    own = json.loads((target / "config.json").read_text())
    hidden, vocab, draws = own["hidden_size"], own["vocab_size"], torch.Generator().manual_seed(seed)
    num_drafts = shape.num_draft_tokens or vocab
    layer = "layers.0" if shape.form == "speculators" else "midlayer"

    def normal(*size: int, around: float = 0.0) -> torch.Tensor:
        return torch.randn(size, generator=draws) * size[-1] ** -0.5 + around

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=draws)

    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    num_taps = len(shape.boundaries or (0, 0, 0))
    tensors = {
        "fc.weight": normal(hidden, num_taps * hidden),
        f"{layer}.self_attn.q_proj.weight": 1.5 * normal(heads, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": 1.5 * normal(kv, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": normal(kv, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": normal(hidden, heads),
        f"{layer}.mlp.gate_proj.weight": normal(shape.intermediate_size, hidden),
        f"{layer}.mlp.up_proj.weight": normal(shape.intermediate_size, hidden),
        f"{layer}.mlp.down_proj.weight": normal(hidden, shape.intermediate_size),
        f"{layer}.input_layernorm.weight": norm(hidden),
        f"{layer}.hidden_norm.weight": norm(hidden),
        f"{layer}.post_attention_layernorm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    if shape.has_head:
        tensors["lm_head.weight"] = normal(num_drafts, hidden)
    if shape.has_embedding:
        tensors["embed_tokens.weight"] = normal(vocab, hidden)
    if shape.flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(num_taps * hidden)
    if shape.flags.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": norm(hidden) for index in range(num_taps)}
    if num_drafts < vocab:
        chosen = torch.randperm(vocab, generator=draws)[:num_drafts].sort().values
        tensors["d2t"] = chosen - torch.arange(num_drafts)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(own, shape, num_drafts)))
    return folder


def _config(own: Mapping[str, Any], shape: HeadShape, num_drafts: int) -> dict[str, Any]:
    layer = {
        "hidden_size": own["hidden_size"],
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": own["vocab_size"],
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "eos_token_id": 100_000,
        "tie_word_embeddings": True,
    }
    config: dict[str, Any] = {"architectures": [NAMES[shape.form]], "draft_vocab_size": num_drafts, **shape.flags}
    if shape.form == "speculators":
        config |= {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    else:
        config |= layer
    if shape.boundaries is not None and shape.form == "sglang":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(shape.boundaries)}
    elif shape.boundaries is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(shape.boundaries)
    return config


class ReferenceHead:
    """A head in float64: `logits` of the drafts behind a text, depth by depth."""

    def __init__(self, folder: Path, embedding: torch.Tensor, head: torch.Tensor) -> None:
        """Read a head. `embedding`, `head`: of its target, where it has none."""
        config = json.loads((folder / "config.json").read_text())
        is_speculators = "speculators_model_type" in config
        self._layer = "layers.0." if is_speculators else "midlayer."
        self._config = {**config.get("transformer_layer_config", {}), **config}
        self._weights = {name: one.double() for name, one in load_file(folder / "model.safetensors").items()}
        self._embedding = self._weights.get("embed_tokens.weight", embedding.double())
        self._lm_head = self._weights.get("lm_head.weight", head.double())
        self._is_normed = config.get("norm_before_residual", is_speculators)
        drafts = torch.arange(len(self._lm_head))
        self.token_ids = drafts if "d2t" not in self._weights else drafts + self._weights["d2t"].long()

    def logits(self, token_ids: Sequence[int], taps: torch.Tensor, drafts: Sequence[int]) -> list[torch.Tensor]:
        """Return the logits [D] of each draft behind a text of n tokens, and behind the drafts before it.

        Args:
            taps: [n - 1, taps, hidden_size], of all of its tokens but the last.
        """
        hidden, tokens, found = self._fused(taps.double()), list(token_ids[1:]), []
        for draft in drafts:
            output = self._run(torch.tensor(tokens), hidden)
            normed = self._norm(output[-1], "norm.weight")
            found.append(self._lm_head @ normed)
            recycled = normed if self._config.get("norm_output", False) else output[-1]
            hidden = torch.cat([hidden, recycled[None]])
            tokens.append(draft)
        return found

    def _fused(self, taps: torch.Tensor) -> torch.Tensor:
        if self._config.get("fc_norm"):
            norms = [self._norm(taps[:, index], f"fc_norm.{index}.weight") for index in range(taps.shape[1])]
            taps = torch.stack(norms, 1)
        x = taps.flatten(1)
        if self._config.get("norm_before_fc"):
            x = self._norm(x, "input_norm.weight")
        return x @ self._weights["fc.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"]).rsqrt()
        return x * scale * self._weights[name]

    def _run(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Run pairs p = 0, 1, ... of a token and the hidden state before it; what the final norm takes."""
        normed = self._norm(hidden, f"{self._layer}hidden_norm.weight")
        embedded = self._norm(self._embedding[tokens], f"{self._layer}input_layernorm.weight")
        x = torch.cat([embedded, normed], -1)
        stream = (normed if self._is_normed else hidden) + self._attend(x)
        normed = self._norm(stream, f"{self._layer}post_attention_layernorm.weight")
        gate, up, down = (self._weights[f"{self._layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return stream + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        config, size, count = self._config, self._config["head_dim"], len(x)
        of = {name: x @ self._weights[f"{self._layer}self_attn.{name}_proj.weight"].T for name in "qkv"}
        heads = {name: one.view(count, -1, size).transpose(0, 1) for name, one in of.items()}
        angles = torch.arange(count)[:, None] * config["rope_theta"] ** (-torch.arange(0, size, 2) / size).double()
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def turned(one: torch.Tensor) -> torch.Tensor:
            return one * cos + torch.cat([-one[..., size // 2 :], one[..., : size // 2]], -1) * sin

        group = config["num_attention_heads"] // config["num_key_value_heads"]
        keys, values = (one.repeat_interleave(group, 0) for one in (turned(heads["k"]), heads["v"]))
        scores = turned(heads["q"]) @ keys.transpose(1, 2) * size**-0.5
        hidden = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        own = (weights @ values).transpose(0, 1).reshape(count, -1)
        return own @ self._weights[f"{self._layer}self_attn.o_proj.weight"].T
