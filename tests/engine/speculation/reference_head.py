"""The drafts of an EAGLE-3 head: the formulas in torch, in float64, from the paper and from what checkpoints name.

Knows no pages, steps or caches: it runs all pairs of one text at once, then one more for each draft.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file


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
